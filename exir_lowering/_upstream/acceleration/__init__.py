"""Reuse results that torch and ExecuTorch would compute again, in threads that ask for it.

Every part replaces attributes of upstream modules and classes as long as any thread accelerates; for other threads, the
replacements do what upstream's code does. Results are the same as without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from exir_lowering._upstream import pins
from exir_lowering._upstream.locks import during, replacing


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


@contextmanager
def accelerating(accelerate: bool = True) -> Iterator[None]:
    """Reuse, in this thread, what conversions would compute again; not with False, even inside another such context."""
    if accelerate:
        with COMPOSITES, during(working, current() or Work(), _ACCELERATING):
            yield
    else:
        with during(working, None, nullcontext()):
            yield


_PARTS = {
    "lookups.histories": "node histories",
    "compilation.replacements": "lazy graph code",
    "lookups.signature_tables": "signature tables",
    "results.replacements": "reused pass results",
    "results.settling": "passes of XNNPACK",
    "lookups.dim_orders": "dim orders and annotations",
    "xnnpack.replacements": "passes of XNNPACK",
}
"""The functions of this package that return what replaces something, in order, each with its feature; see `pins`."""


def _replace_in(part: str, feature: str) -> list[tuple[Any, str, Any]]:
    """Return what a function replaces; nothing, and its module is not imported, if its feature is off."""
    if not pins.is_on(feature):
        return []
    module, _, function = part.partition(".")
    replacements: list[tuple[Any, str, Any]] = getattr(import_module(f"{__name__}.{module}"), function)()
    return replacements


_ACCELERATING = replacing(lambda: [new for part, feature in _PARTS.items() for new in _replace_in(part, feature)])

COMPOSITES = replacing(lambda: _replace_in("lookups.composites", "composite operators"))
"""A context in which torch's composite operators are looked up once; `accelerating` includes it."""
