"""One call of the compiler: its options, its cache, and the progress and times that its steps report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as RichProgress, TextColumn, TimeElapsedColumn

from exir_lowering.options import LoweringOptions
from exir_lowering.plans.report import Times
from exir_lowering.plugins import registry
from exir_lowering.pte.releases import find_target
from exir_lowering.steps.cache.store import Cache

T = TypeVar("T")
Backends = Mapping[str, Any]  # by id, before the installed ones


class Progress(RichProgress):
    """Shows named steps with a count on standard error while it is entered, if enabled and that is a terminal."""

    def __init__(self, enabled: bool) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=console, disable=not (enabled and console.is_terminal))

    def each(self, step: str, items: Collection[T]) -> Iterator[T]:
        """Yield items and count them as done when the next one is asked for."""
        advance = self.count(step, len(items))
        for item in items:
            yield item
            advance()

    def count(self, step: str, total: int) -> Callable[[], None]:
        """Show a step; return what counts one more item as done."""
        return partial(self.advance, self.add_task(step, total=total))


class Session:
    """One call of the compiler; `with session.progress` shows what it does."""

    def __init__(self, options: LoweringOptions, backends: Backends | None = None) -> None:
        registry.check_backends(backends)
        self.options, self.backends, self.progress = options, backends, Progress(options.progress)
        self.times, self.cache = Times(), Cache(options.cache)
        self.timed = self.times.step
        self.target = find_target(options.target)  # the runtime that host operators have to run in
