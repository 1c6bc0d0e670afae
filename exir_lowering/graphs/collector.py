"""Keep the cyclic garbage collector, for the whole process, from walking over everything while graphs are built."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from exir_lowering._upstream.locks import Change, Shared, collector_paused


@contextmanager
def heap_frozen() -> Iterator[Callable[[], None]]:
    """Set aside all live objects, so that full collections do not walk over all of torch; yield what does so again.

    It does nothing if the heap was already frozen by other code, which may rely on that.
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
