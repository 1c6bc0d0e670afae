"""Read the profile events of an ETDump: what ExecuTorch's runtime recorded while it executed.

ExecuTorch's own reader starts flatc, and keeps one of several events of a run that have the same identifier.
"""

from __future__ import annotations

from collections.abc import Iterator

from exir_lowering.pte import slots
from exir_lowering.pte.flatbuffer import Table, root
from exir_lowering.runtime.trace import TraceEvent

_Field = slots.ProfileEvent


def read(content: bytes) -> list[TraceEvent]:
    """Return the events of all executions, in order, without those of loading; a CorruptError if it is no ETDump."""
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
