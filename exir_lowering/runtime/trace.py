"""What an engine records of a run: which instruction took how long, and what its delegate did meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from exir_lowering.pte import slots
from exir_lowering.pte.flatbuffer import Table, root

METHOD, KERNEL, DELEGATE = "Method::execute", "OPERATOR_CALL", "DELEGATE_CALL"
"""What ExecuTorch's runtime calls its events."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that took time."""

    name: str  # what the runtime calls it, such as "DELEGATE_CALL"
    instruction: int  # the number of the instruction of which it is a part; -1 for none
    identifier: int | str | None  # what a delegate calls it; None for an event of the runtime itself
    nanoseconds: int  # how long it took
    start: int = 0  # when it began, in nanoseconds since an arbitrary point in time


@dataclass(slots=True, eq=False)
class Trace:
    """Records what the interpreter does. It is also a `Recorder` of delegates."""

    events: list[TraceEvent] = field(default_factory=list)
    active: bool = False  # whether a delegate is being executed
    instruction: int = -1  # the one that is being executed

    def now(self) -> int:
        """Return the time in nanoseconds."""
        return time.perf_counter_ns()

    def record(self, identifier: int | str, start: int, end: int) -> None:
        """Record an event of the delegate that is being executed."""
        self.events.append(TraceEvent("", self.instruction, identifier, end - start, start))

    def begin(self, instruction: int, name: str) -> int:
        """Begin an instruction, or with -1 the method, and return the time."""
        self.instruction, self.active = instruction, name == DELEGATE
        return self.now()

    def end(self, instruction: int, name: str, start: int) -> None:
        """Record an instruction that has ended."""
        took = self.now() - start
        self.active = False
        self.events.append(TraceEvent(name, instruction, None, took, start))


_Field = slots.ProfileEvent


def read_etdump(content: bytes) -> list[TraceEvent]:
    """Return the events of all executions that an ETDump has, in order, without those of loading."""
    # ExecuTorch's own reader starts flatc, and keeps one of several events of a run that have the same identifier.
    events: list[TraceEvent] = []
    for run in root(memoryview(content)[4:]).tables(slots.ETDump.RUN_DATA):  # after its size
        if run.text(slots.RunData.NAME) == "Execute":
            events += _events(run)
    return events


def _events(run: Table) -> Iterator[TraceEvent]:
    for entry in run.tables(slots.RunData.EVENTS):
        event = entry.table(slots.Event.PROFILE_EVENT)
        if event is not None:
            number, text = event.number(_Field.DELEGATE_DEBUG_ID_INT, "i", -1), event.text(_Field.DELEGATE_DEBUG_ID_STR)
            identifier = text or (number if number >= 0 else None)
            start = event.number(_Field.START_TIME, "Q")
            took = event.number(_Field.END_TIME, "Q") - start
            chained = event.number(_Field.CHAIN_INDEX, "i") >= 0
            instruction = event.number(_Field.INSTRUCTION_ID, "i", -1) if chained else -1
            yield TraceEvent(event.text(_Field.NAME), instruction, identifier, max(took, 0), start)
