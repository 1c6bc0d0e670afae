"""Which threads accelerate, and what they remember while they do."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Work:
    """What one thread remembers from its outermost `accelerating()` on; forgotten with it."""

    forms: dict[Any, Any] = field(default_factory=dict)  # of results, by operator and the forms of its inputs
    retraced: Any = None  # XNNPACK's partition whose nodes have the values that tracing would give them
    hints: dict[type, Any] = field(default_factory=dict)  # the annotations of classes that are written as JSON
    # whether each pass of XNNPACK is what the conditions for it were written for
    known: dict[Any, bool] = field(default_factory=dict)
    running: Any = None  # the class of XNNPACK's pass that runs, if its condition was written for it
    tables: dict[Any, Any] = field(default_factory=dict)  # of signatures, by identity


working: ContextVar[Work | None] = ContextVar("exir_lowering_accelerating", default=None)


def current() -> Work | None:
    """Return what the calling thread remembers, None if it does not accelerate."""
    return working.get()
