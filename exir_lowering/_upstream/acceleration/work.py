"""Which threads accelerate, and what they remember while they do."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Work",
    "current",
    "working",
]


@dataclass(slots=True, eq=False)
class Work:
    """What one thread remembers from its outermost `accelerating()` on; forgotten with it.

    Attributes:
        results: Fake results of operators, by operator and inputs, in the order in which one pass computed them.
        kept: What the keys of `results` name by identity, so that no identity is used twice.
        hints: The annotations of classes that are written as JSON.
        known: Whether each pass of XNNPACK is what the conditions for it were written for.
        retraced: The program of XNNPACK's partition whose nodes have the values that tracing would give them.
        running: The class of XNNPACK's pass that runs, if its condition was written for it.
        forms: The forms of results, by operator and the forms of its inputs.
        tables: Tables of signatures, by identity.
    """

    results: dict[Any, list[Any]] = field(default_factory=dict)
    kept: dict[int, Any] = field(default_factory=dict)
    retraced: Any = None
    hints: dict[type, Any] = field(default_factory=dict)
    known: dict[Any, bool] = field(default_factory=dict)
    running: Any = None
    forms: dict[Any, Any] = field(default_factory=dict)
    tables: dict[Any, Any] = field(default_factory=dict)


working: ContextVar[Work | None] = ContextVar("exir_lowering_accelerating", default=None)


def current() -> Work | None:
    """Return what the calling thread remembers, None if it does not accelerate."""
    return working.get()
