"""Read the profile events of an ETDump: what ExecuTorch's runtime recorded while it executed.

ExecuTorch's own reader starts flatc, and keeps one of several events of a run that have the same identifier.
"""

from __future__ import annotations

from collections.abc import Iterator

from exir_lowering.pte.flatbuffer import Table, root
from exir_lowering.runtime.trace import Event


def read(content: bytes) -> list[Event]:
    """Return the events of all executions, in their order; those of loading are left out.

    Raises:
        CorruptError: The content is no ETDump.
    """
    events: list[Event] = []
    for run in root(memoryview(content)[4:]).tables(1):  # after its size
        if run.text(0) == "Execute":
            events += _events(run)
    return events


def _events(run: Table) -> Iterator[Event]:
    for entry in run.tables(3):
        event = entry.table(0)
        if event is not None:
            number, text = event.number(3, "i", -1), event.text(4)
            identifier = text or (number if number >= 0 else None)
            start = event.number(6, "Q")
            took = event.number(7, "Q") - start
            instruction = event.number(2, "i", -1) if event.number(1, "i") >= 0 else -1
            yield Event(event.text(0), instruction, identifier, max(took, 0), start)
