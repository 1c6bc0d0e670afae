"""Keep Python's cyclic garbage collector from walking over everything repeatedly while graphs are built.

Both functions change settings of the process, for as long as any thread needs them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from exir_lowering._upstream.locks import Change, Shared, collector_paused


@contextmanager
def heap_frozen() -> Iterator[Callable[[], None]]:
    """Set aside all live objects: within the context, the collector looks at new objects only.

    Building graphs makes many objects and little garbage, which triggers full collections. Each one walks everything
    that torch has loaded, a million objects, and costs as much as lowering hundreds of partitions, at moments that
    depend on what ran before. Backends benefit too: their passes rebuild graphs dozens of times.

    Yields:
        A function that also sets aside the objects made since then, for those that will stay alive. It does nothing if
        the heap was already frozen by other code, which may rely on that.
    """
    with _FROZEN:
        yield (lambda: None) if _frozen_elsewhere else gc.freeze


def paused() -> AbstractContextManager[None]:
    """Keep the collector from running at all, for our own code that makes no garbage."""
    return collector_paused


_frozen_elsewhere = False  # counting what other code has set aside takes 40 ms: it is done once


def _freezing() -> tuple[Change, Change]:
    global _frozen_elsewhere
    _frozen_elsewhere = _frozen_elsewhere or gc.get_freeze_count() > 0
    return ((lambda: None), (lambda: None)) if _frozen_elsewhere else (gc.freeze, gc.unfreeze)


_FROZEN = Shared(_freezing)
