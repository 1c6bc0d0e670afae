"""Attributes of upstream classes and modules that are replaced temporarily."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import getattr_static
from typing import Any

from exir_lowering._upstream.locks import Change, Shared

__all__ = [
    "replacing",
]


def replacing(replacements: Callable[[], Sequence[tuple[Any, str, Any]]]) -> Shared:
    """Replace attributes of upstream classes and modules as long as any thread needs it."""

    def prepare() -> tuple[Change, Change]:
        originals = [(owner, name, getattr_static(owner, name), new) for owner, name, new in replacements()]

        def replace() -> None:
            for owner, name, _, new in originals:
                setattr(owner, name, new)

        def restore() -> None:
            for owner, name, original, _ in originals:
                setattr(owner, name, original)

        return replace, restore

    return Shared(prepare)
