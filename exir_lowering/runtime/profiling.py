"""Where the time of a method goes: per kernel, per delegate and per instruction of a delegate, with source lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from exir_lowering.errors import InputError
from exir_lowering.pte import slots
from exir_lowering.pte.debug_info import DebugDelegate, MethodDebug
from exir_lowering.pte.flatbuffer import root
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.printing import Shown, make_table, printable, render

if TYPE_CHECKING:
    from rich.table import Table

VERSION = 1
"""Incremented when a field of the JSON changes its meaning or is removed."""

_LINES = 3  # source lines that the table has for a delegate

METHOD_EVENT = "Method::execute"
_KINDS = {"OPERATOR_CALL": "kernel", "DELEGATE_CALL": "delegate"}  # what ExecuTorch's runtime calls its events

_COUNTED = re.compile(r" #\d+$")
"""Delegates number instructions of the same name."""

_INDENT = {"method": "", "kernel": "  ", "delegate": "  ", "instruction": "    "}


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that took time."""

    name: str  # what the runtime calls it, such as "DELEGATE_CALL"
    instruction: int  # the number of the instruction of which it is a part; -1 for none
    identifier: int | str | None  # what a delegate calls it; None for an event of the runtime itself
    nanoseconds: int  # how long it took
    start: int = 0  # when it began, in nanoseconds since an arbitrary point in time


def read_etdump(content: bytes) -> list[TraceEvent]:
    """Return the events of all executions that an ETDump has, in order, without those of loading."""
    # ExecuTorch's own reader starts flatc, and keeps one of several events of a run that have the same identifier.
    field, events = slots.ProfileEvent, []
    for run in root(memoryview(content)[4:]).tables(slots.ETDump.RUN_DATA):  # after its size
        entries = run.tables(slots.RunData.EVENTS) if run.text(slots.RunData.NAME) == "Execute" else ()
        for event in (entry.table(slots.Event.PROFILE_EVENT) for entry in entries):
            if event is not None:
                number = event.number(field.DELEGATE_DEBUG_ID_INT, "i", -1)
                identifier = event.text(field.DELEGATE_DEBUG_ID_STR) or (number if number >= 0 else None)
                start, end = event.number(field.START_TIME, "Q"), event.number(field.END_TIME, "Q")
                chained = event.number(field.CHAIN_INDEX, "i") >= 0
                instruction = event.number(field.INSTRUCTION_ID, "i", -1) if chained else -1
                name = event.text(field.NAME)
                events.append(TraceEvent(name, instruction, identifier, max(end - start, 0), start))
    return events


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """What took time.

    An instruction that calls a nested graph stands before those of the graph, and its time includes theirs: the
    instructions of a delegate can then take more time in total than the delegate.

    Attributes:
        kind: "method", "kernel", "delegate", or "instruction" of the delegate above it.
        name: The method, the operator of the model or, where that is not known, of the file (such as "aten.add.out"),
            the backend's number in the method, or what the delegate calls it.
        backend: The backend of a delegate or an instruction, "" for others and when it is not known.
        instruction: The number of the instruction in the file, -1 for the method and for operators that are added up.
        handles: The debug handles that it stands for.
        calls: How often it was executed.
        milliseconds: How long that took in total.
        share: The fraction of the method's time, 0 to 1.
        sources: The model's lines; none without debug information.
    """

    kind: str
    name: str
    backend: str
    instruction: int
    handles: tuple[int, ...]
    calls: int
    milliseconds: float
    share: float
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Profile(Shown):
    """Where the time of a method went.

    Attributes:
        method: The method.
        runs: How often it was run.
        rows: The method, then its kernels and delegates in the order of the file, each delegate with its instructions.
    """

    method: str
    runs: int
    rows: tuple[ProfileRow, ...]

    def by_time(self, top: int | None = None) -> Profile:
        """Return the profile with the slowest rows first.

        Args:
            top: How many kernels, delegates and instructions of delegates to keep; None for all.

        Returns:
            The profile; the method stays the first row.

        Raises:
            InputError: `top` is not a number above 0.
        """
        if top is not None and (type(top) is not int or top < 1):
            raise InputError(f"by_time: top: got {top!r}, expected a number of at least 1, or None.")
        rows = sorted(self.rows[1:], key=lambda row: (-row.milliseconds, row.instruction))
        return Profile(self.method, self.runs, (*self.rows[:1], *rows[:top]))

    def by_operator(self) -> Profile:
        """Return the profile with one row for each operator, the slowest first, whatever delegates it is in.

        Kernels and instructions of a name are added up; of delegates, what they take beside their instructions.

        Returns:
            The profile; the method stays the first row, and the others have no number of an instruction.
        """
        whole, groups, inside = self.rows[0], dict[tuple[str, str, str], list[ProfileRow]](), dict[int, float]()
        for row in self.rows[1:]:
            name = "delegate" if row.kind == "delegate" else _COUNTED.sub("", row.name)
            groups.setdefault((row.kind, name, row.backend), []).append(row)
            if row.kind == "instruction":
                inside[row.instruction] = inside.get(row.instruction, 0.0) + row.milliseconds
        rows = []
        for (kind, name, backend), group in groups.items():
            less = inside if kind == "delegate" else {}
            took = sum(max(row.milliseconds - less.get(row.instruction, 0.0), 0.0) for row in group)
            handles, sources = (
                tuple(dict.fromkeys(one for row in group for one in getattr(row, field)))
                for field in ("handles", "sources")
            )
            times = sum(row.calls for row in group), took, took / whole.milliseconds if whole.milliseconds else 0.0
            rows.append(ProfileRow(kind, name, backend, -1, handles, *times, sources))
        return Profile(self.method, self.runs, (whole, *rows)).by_time()

    def table(self) -> Table:
        """Return the table for a terminal."""
        rows, inside = [], -1
        for row in self.rows:
            inside = inside if row.kind == "instruction" else row.instruction
            # By time, instructions stand below rows that are not their delegates.
            alone = row.instruction < 0 or row.instruction != inside
            kind = "delegate" if row.kind == "instruction" and alone else row.kind
            what = _INDENT[kind] + printable(row.name + f" ({row.backend})" * (kind == "delegate"))
            more = [f"and {len(row.sources) - _LINES} more"] * (len(row.sources) > _LINES)
            where = "\n".join(map(printable, [*row.sources[:_LINES], *more]))
            rows.append((what, str(row.calls), f"{row.milliseconds:.3f}", f"{row.share:.1%}", where))
        numbers, title = ("calls", "ms", "share"), f"Profile of {printable(self.method)}, {self._runs}"
        return make_table(("what", *numbers, "source"), rows, numbers, title, whole=True)

    def to_text(self, width: int = 120) -> str:
        """Return the table as plain text.

        Args:
            width: The width of a line, in characters.
        """
        return render([self.table()], width)

    def to_json(self) -> str:
        """Return it as JSON: `{"version": 1, "method", "runs", "rows": [...]}`, the fields of `ProfileRow`."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=2)

    def __repr__(self) -> str:
        return f"Profile({printable(self.method)}: {self._runs}, {len(self.rows)} rows)"

    @property
    def _runs(self) -> str:
        return "1 run" if self.runs == 1 else f"{self.runs:,} runs"


def profile(method: MethodSpec, runs: int, events: Sequence[TraceEvent], known: MethodDebug | None) -> Profile:
    """Add up what was recorded in so many runs; `known` is what is known about the method's debug handles."""
    debug = known or MethodDebug({}, (), {})
    whole = [event for event in events if event.instruction < 0 and event.name == METHOD_EVENT]
    method_time = sum(event.nanoseconds for event in whole)
    # The events of each instruction of the file: under None its own, and by identifier those inside a delegate.
    steps: dict[int, dict[Any, list[TraceEvent]]] = {}
    for event in events:
        if event.instruction >= 0 and (event.identifier is not None or event.name in _KINDS):
            steps.setdefault(event.instruction, {}).setdefault(event.identifier, []).append(event)
    kinds = {number: _KINDS[step[None][-1].name] for number, step in sorted(steps.items()) if None in step}

    rows: list[ProfileRow] = []

    def add(kind: str, name: str, backend: str, number: int, handles: Any, counted: Any) -> None:
        took = sum(event.nanoseconds for event in counted)
        times = len(counted), took / 1e6, took / method_time if method_time else 0.0
        rows.append(ProfileRow(kind, name, backend, number, handles, *times, tuple(debug.lines(handles))))

    add("method", method.name, "", -1, (), whole)
    for number, kind in kinds.items():
        own = steps[number].pop(None)
        if kind == "kernel":
            handles = debug.kernels.get(number, ())
            operators = _operators(debug, handles)
            # Several operators that were decomposed from one have one handle: the file says which one it is.
            listed = method.kernels.get(number, f"instruction {number}")
            name = listed if ", " in operators else operators or listed
            add("kernel", name, "", number, handles, own)
            continue
        target = method.called.get(number, -1)
        backend = method.delegations[target].backend if target >= 0 else ""
        known_here = 0 <= target < len(debug.delegates)
        delegate = debug.delegates[target] if known_here else DebugDelegate(backend, number, (), {})
        name = f"delegate {target}" if target >= 0 else f"delegate at instruction {number}"
        add("delegate", name, backend, number, delegate.handles, own)
        # By their start, and of those that begin together the longer one first.
        begun = {key: min((one.start, -one.nanoseconds) for one in inner) for key, inner in steps[number].items()}
        for identifier, inner in sorted(steps[number].items(), key=lambda item: begun[item[0]]):
            handles = delegate.handle_map.get(identifier, ())
            shown = identifier if isinstance(identifier, str) else _operators(debug, handles)
            add("instruction", shown or f"event {identifier}", backend, number, handles, inner)
    return Profile(method.name, runs, tuple(rows))


def _operators(debug: MethodDebug, handles: Iterable[int]) -> str:
    """Return the operators that debug handles stand for."""
    nodes = (node for handle in handles for node in debug.nodes.get(handle, ()))
    return ", ".join(dict.fromkeys(node.operator for node in nodes))
