"""Attributes of upstream classes and modules that are replaced temporarily."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from inspect import getattr_static
from typing import Any, TypeVar

from exir_lowering._upstream.locks import Change, Shared

Value = TypeVar("Value")

_REPLACED: dict[tuple[int, str, int], Any] = {}
"""What is replaced now, by the identity of its owner, its name, and the identity of what is in its place."""


def original_of(owner: Any, name: str, value: Any) -> Any:
    """Return what an attribute would be without `replacing`: the value itself, unless it was put there."""
    while (id(owner), name, id(value)) in _REPLACED:
        value = _REPLACED[id(owner), name, id(value)]
    return value


def replacing(replacements: Callable[[], Sequence[tuple[Any, str, Any]]]) -> Shared:
    """Replace attributes of upstream classes and modules as long as any thread needs it."""

    def prepare() -> tuple[Change, Change]:
        originals = [(owner, name, getattr_static(owner, name), new) for owner, name, new in replacements()]

        def replace() -> None:
            for owner, name, original, new in originals:
                _REPLACED[id(owner), name, id(new)] = original
                setattr(owner, name, new)

        def restore() -> None:
            for owner, name, original, new in originals:
                setattr(owner, name, original)
                _REPLACED.pop((id(owner), name, id(new)), None)

        return replace, restore

    return Shared(prepare)


@contextmanager
def during(variable: ContextVar[Any], value: Value, change: AbstractContextManager[None]) -> Iterator[Value]:
    """Set a variable of this thread, and make a change that all threads share, while the context lasts."""
    before = variable.get()
    try:
        variable.set(value)
        with change:
            yield value
    finally:
        variable.set(before)
