"""The options of one call of the compiler, and the progress and times that its steps report."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType

from exir_lowering.options import LoweringOptions
from exir_lowering.plans.report import Times
from exir_lowering.steps.cache.using import Cache
from exir_lowering.steps.progress import Progress


@dataclass(frozen=True, slots=True)
class Session:
    """One call of the compiler; progress is shown while it is entered."""

    options: LoweringOptions
    progress: Progress = field(init=False)
    times: Times = field(init=False, default_factory=Times)  # seconds by step
    cache: Cache = field(init=False)  # with what it did

    def __post_init__(self) -> None:
        object.__setattr__(self, "progress", Progress(self.options.progress))
        object.__setattr__(self, "cache", Cache(self.options.cache))

    def __enter__(self) -> Session:
        self.progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.__exit__(kind, error, trace)

    def timed(self, step: str) -> AbstractContextManager[None]:
        """Add the time that the body takes to that of a step."""
        return self.times.step(step)
