"""Progress of long work on standard error, silent if that is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as RichProgress, TextColumn, TimeElapsedColumn

T = TypeVar("T")


class Progress:
    """Shows named steps with a count, if enabled."""

    def __init__(self, enabled: bool) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._rich = RichProgress(*columns, console=console, disable=not (enabled and console.is_terminal))

    def __enter__(self) -> Progress:
        self._rich.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rich.stop()

    def each(self, step: str, items: Collection[T]) -> Iterator[T]:
        """Yield items and count them as done when the next one is asked for."""
        with self.count(step, len(items)) as advance:
            for item in items:
                yield item
                advance()

    @contextmanager
    def count(self, step: str, total: int) -> Iterator[Callable[[], None]]:
        """Show a step; the context's value is a function that counts one more item as done."""
        task = self._rich.add_task(step, total=total)
        yield lambda: self._rich.advance(task)
