"""Reuse results that torch and ExecuTorch would compute again, in threads that ask for it.

Every part replaces attributes of upstream modules and classes as long as any thread accelerates; for other threads, the
replacements do what upstream's code does. Results are the same as without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from exir_lowering._upstream import pins
from exir_lowering._upstream.acceleration.memory import Work, current, working
from exir_lowering._upstream.replacing import replacing


@contextmanager
def accelerating(accelerate: bool = True) -> Iterator[None]:
    """Reuse, in this thread and while the context lasts, what torch's and ExecuTorch's conversions would compute again.

    Contexts nest: an inner one goes on with what the outer one knows. With False, this thread does not, even inside
    another.
    """
    if not accelerate:
        token = working.set(None)
        try:
            yield
        finally:
            working.reset(token)
        return
    token = working.set(current() or Work())
    try:
        with COMPOSITES, _ACCELERATING:
            yield
    finally:
        working.reset(token)


_PARTS = {
    "histories": "node histories",
    "compilation": "lazy graph code",
    "signature_tables": "signature tables",
    "fake_results": "reused pass results",
    "settling": "passes of XNNPACK",
    "emission": "dim orders and annotations",
    "xnnpack": "passes of XNNPACK",
}
"""The modules of this package that replace something, in order, each with its feature; see `pins`."""


def _replace_in(module: str, feature: str) -> list[tuple[Any, str, Any]]:
    """Return what a module replaces; nothing, and the module is not imported, if its feature is off."""
    if not pins.is_on(feature):
        return []
    part = import_module(f"{__name__}.{module}")
    replacements: list[tuple[Any, str, Any]] = part.replacements()
    return replacements


_ACCELERATING = replacing(lambda: [new for part, feature in _PARTS.items() for new in _replace_in(part, feature)])

COMPOSITES = replacing(lambda: _replace_in("composites", "composite operators"))
"""A context in which torch's composite operators are looked up once; `accelerating` includes it."""
