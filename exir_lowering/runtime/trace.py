"""What an engine records of a run: which instruction took how long, and what its delegate did meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

METHOD, KERNEL, DELEGATE = "Method::execute", "OPERATOR_CALL", "DELEGATE_CALL"
"""What ExecuTorch's runtime calls its events."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that took time.

    Attributes:
        name: What the runtime calls it, such as "DELEGATE_CALL".
        instruction: The number of the instruction of which it is a part; -1 for none.
        identifier: What a delegate calls it; None for an event of the runtime itself.
        nanoseconds: How long it took.
        start: When it began, in nanoseconds since an arbitrary point in time.
    """

    name: str
    instruction: int
    identifier: int | str | None
    nanoseconds: int
    start: int = 0


@dataclass(slots=True, eq=False)
class Trace:
    """Records what the interpreter does. It is also a `Recorder` of delegates.

    Attributes:
        events: What was recorded.
        active: Whether a delegate is being executed.
        instruction: The instruction that is being executed.
    """

    events: list[TraceEvent] = field(default_factory=list)
    active: bool = False
    instruction: int = -1

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
