"""Where the time of a method goes: per kernel, per delegate and per instruction of a delegate, with source lines."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from exir_lowering.pte.debug_info import DebugDelegate, MethodDebug
from exir_lowering.pte.format import MethodSpec
from exir_lowering.runtime.trace import DELEGATE, KERNEL, METHOD, TraceEvent

if TYPE_CHECKING:
    from rich.table import Table

VERSION = 1
"""Incremented when a field of the JSON changes its meaning or is removed."""

_LINES = 3
"""Source lines that the table has for a delegate."""


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
        instruction: The number of the instruction in the file, -1 for the method.
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


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of a method went.

    Attributes:
        method: The method.
        runs: How often it was run.
        rows: The method, then its kernels and delegates in the order of the file, each delegate with its instructions.
    """

    method: str
    runs: int
    rows: tuple[ProfileRow, ...]

    def table(self) -> Table:
        """Return the table for a terminal."""
        # Not at the top: importing rich takes as long as running a small file.
        from rich import box
        from rich.table import Table
        from rich.text import Text

        runs = "1 run" if self.runs == 1 else f"{self.runs} runs"
        table = Table(
            title=f"Profile of {self.method}, {runs}", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0)
        )
        for column in ("what", "calls", "ms", "share", "source"):
            left = column in ("what", "source")
            table.add_column(column, justify="left" if left else "right", overflow="fold", no_wrap=not left)
        for row in self.rows:
            lines = [*row.sources[:_LINES]]
            if len(row.sources) > _LINES:
                lines.append(f"and {len(row.sources) - _LINES} more")
            what = Text(f"{_INDENT[row.kind]}{_what(row)}")
            table.add_row(what, str(row.calls), f"{row.milliseconds:.3f}", f"{row.share:.1%}", Text("\n".join(lines)))
        return table

    def to_text(self, width: int = 120) -> str:
        """Return the table as plain text.

        Args:
            width: The width of a line, in characters.
        """
        from rich.console import Console

        out = io.StringIO()
        console = Console(file=out, width=width, force_terminal=False, color_system=None, highlight=False, emoji=False)
        console.print(self.table())
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"

    def to_json(self) -> str:
        """Return it as JSON: `{"version": 1, "method", "runs", "rows": [...]}`, the fields of `ProfileRow`."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        return self.to_text()


_INDENT = {"method": "", "kernel": "  ", "delegate": "  ", "instruction": "    "}


def _what(row: ProfileRow) -> str:
    return f"{row.name} ({row.backend})" if row.kind == "delegate" and row.backend else row.name


@dataclass(slots=True)
class _Sum:
    """The events of one row."""

    calls: int = 0
    nanoseconds: int = 0
    first: tuple[int, int] = (0, 0)

    def add(self, event: TraceEvent) -> None:
        """Count an event; `first` orders by start, and then the longer one first."""
        begun = (event.start, -event.nanoseconds)
        self.first = min(self.first, begun) if self.calls else begun
        self.calls += 1
        self.nanoseconds += event.nanoseconds


@dataclass(slots=True)
class _Step:
    """The events of one instruction of the file: a kernel or a delegate, and what happened inside it."""

    kind: str = ""
    sum: _Sum = field(default_factory=_Sum)
    inner: dict[int | str, _Sum] = field(default_factory=dict)


def profile(method: MethodSpec, runs: int, events: Iterable[TraceEvent], debug: MethodDebug | None) -> Profile:
    """Add up what was recorded in so many runs; `debug` is what is known about the method's debug handles."""
    whole = _Sum()
    steps: dict[int, _Step] = {}
    for event in events:
        if event.instruction < 0:
            if event.name == METHOD:
                whole.add(event)
            continue
        _count(steps.setdefault(event.instruction, _Step()), event)
    steps = {number: steps[number] for number in sorted(steps) if steps[number].kind}
    rows = [_row("method", method.name, whole, whole)]
    delegates = _delegates(method, [number for number, step in steps.items() if step.kind == "delegate"], debug)
    for number, step in steps.items():
        if step.kind == "delegate":
            rows += _delegate(number, step, whole, *delegates[number], debug)
        else:
            handles = debug.kernels.get(number, ()) if debug is not None else ()
            operators = _operators(debug, handles)
            # Several operators that were decomposed from one have one handle: the file says which one it is.
            listed = method.kernels.get(number, f"instruction {number}")
            name = listed if ", " in operators else operators or listed
            rows.append(_row("kernel", name, step.sum, whole, number, handles, debug))
    return Profile(method.name, runs, tuple(rows))


def _count(step: _Step, event: TraceEvent) -> None:
    if event.identifier is not None:
        step.inner.setdefault(event.identifier, _Sum()).add(event)
    elif event.name in (DELEGATE, KERNEL):
        step.kind = "delegate" if event.name == DELEGATE else "kernel"
        step.sum.add(event)


def _delegates(
    method: MethodSpec, called: Sequence[int], debug: MethodDebug | None
) -> dict[int, tuple[str, str, DebugDelegate | None]]:
    """Return for each instruction that calls a delegate its name, its backend, and what is known of it."""
    if debug is not None:
        known = {delegate.instruction: (number, delegate) for number, delegate in enumerate(debug.delegates)}
        if all(number in known for number in called):
            found = {number: known[number] for number in called}
            return {n: (f"delegate {index}", delegate.backend_id, delegate) for n, (index, delegate) in found.items()}
    # A file numbers its delegates in the order of the instructions that call them.
    backends = [delegation.backend for delegation in method.delegations]
    if len(called) == len(backends):
        return {n: (f"delegate {i}", backends[i], None) for i, n in enumerate(called)}
    backend = backends[0] if len(set(backends)) == 1 else ""
    return {number: (f"delegate at instruction {number}", backend, None) for number in called}


def _delegate(
    number: int,
    step: _Step,
    whole: _Sum,
    name: str,
    backend: str,
    known: DebugDelegate | None,
    debug: MethodDebug | None,
) -> Iterator[ProfileRow]:
    handles = known.handles if known is not None else ()
    yield _row("delegate", name, step.sum, whole, number, handles, debug, backend)
    for identifier, total in sorted(step.inner.items(), key=lambda item: item[1].first):
        handles = known.handle_map.get(identifier, ()) if known is not None else ()
        called = identifier if isinstance(identifier, str) else _operators(debug, handles) or f"event {identifier}"
        yield _row("instruction", called, total, whole, number, handles, debug, backend)


def _row(
    kind: str,
    name: str,
    total: _Sum,
    whole: _Sum,
    instruction: int = -1,
    handles: tuple[int, ...] = (),
    debug: MethodDebug | None = None,
    backend: str = "",
) -> ProfileRow:
    share = total.nanoseconds / whole.nanoseconds if whole.nanoseconds else 0.0
    lines = tuple(debug.lines(handles)) if debug is not None else ()
    return ProfileRow(kind, name, backend, instruction, handles, total.calls, total.nanoseconds / 1e6, share, lines)


def _operators(debug: MethodDebug | None, handles: Iterable[int]) -> str:
    """Return the operators that debug handles stand for."""
    nodes = (node for handle in handles for node in debug.nodes.get(handle, ())) if debug is not None else ()
    return ", ".join(dict.fromkeys(node.operator for node in nodes))
