"""What torch and ExecuTorch compute again although they have it: reused, for the thread that asks for it.

Every part replaces attributes of upstream modules and classes as long as any thread accelerates; for the others, what
is put there does what upstream's does. Results are the same as without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from exir_lowering._upstream.acceleration import (
    compilation,
    composites,
    emission,
    fakes,
    histories,
    settling,
    signatures,
    xnnpack,
)
from exir_lowering._upstream.acceleration.work import Work, current, working
from exir_lowering._upstream.replacing import replacing

__all__ = [
    "COMPOSITES",
    "accelerating",
]


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


def _replacements() -> list[tuple[Any, str, Any]]:
    parts = (histories, compilation, signatures, fakes, settling, emission, xnnpack)
    return [replacement for part in parts for replacement in part.replacements()]


_ACCELERATING = replacing(_replacements)

COMPOSITES = replacing(composites.replacements)
"""A context in which torch's composite operators are looked up once; `accelerating` includes it."""
