"""Keep Python's cyclic garbage collector from walking over everything repeatedly while graphs are built.

Both functions change settings of the process, for as long as any thread needs them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from exir_lowering._upstream.locks import Shared


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
        yield lambda: gc.freeze() if _frozen_here else None


def paused() -> AbstractContextManager[None]:
    """Keep the collector from running at all, for our own code that makes no garbage."""
    return _PAUSED


_frozen_here = False


def _freeze() -> Callable[[], None]:
    global _frozen_here
    if gc.get_freeze_count():
        return lambda: None
    gc.freeze()
    _frozen_here = True
    return _unfreeze


def _unfreeze() -> None:
    global _frozen_here
    _frozen_here = False
    gc.unfreeze()


def _pause() -> Callable[[], None]:
    if not gc.isenabled():
        return lambda: None
    gc.disable()
    return gc.enable


_FROZEN, _PAUSED = Shared(_freeze), Shared(_pause)
