"""Attributes of upstream classes and modules that are replaced temporarily."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from exir_lowering._upstream.locks import Shared

__all__ = [
    "replacing",
]


def replacing(replacements: Callable[[], Sequence[tuple[Any, str, Any]]]) -> Shared:
    """Replace attributes of upstream classes and modules as long as any thread needs it."""

    def replace() -> Callable[[], None]:
        originals = [(owner, name, getattr(owner, name), new) for owner, name, new in replacements()]
        for owner, name, _, new in originals:
            setattr(owner, name, new)

        def restore() -> None:
            for owner, name, original, _ in originals:
                setattr(owner, name, original)

        return restore

    return Shared(replace)
