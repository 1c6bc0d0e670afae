"""Keeping Python's cyclic garbage collector from walking over everything again and again while graphs are built.

Both are settings of the process: they last as long as any thread needs them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from exir_lowering._upstream.locks import Shared


@contextmanager
def heap_frozen() -> Iterator[Callable[[], None]]:
    """Set aside what is alive: inside of the context, the collector looks at new objects only.

    Building graphs makes many objects and little garbage, which triggers full collections. Each walks all that torch
    has loaded, a million objects, and costs as much as lowering hundreds of partitions, at moments that depend on what
    ran before. Backends gain too: their passes rebuild graphs dozens of times.

    The value is a function that sets aside what has been made since, for objects that will stay alive. It does nothing
    where somebody else froze the heap, and will want it to stay so.
    """
    with _FROZEN:
        yield lambda: gc.freeze() if _frozen_here else None


def paused() -> AbstractContextManager[None]:
    """Keep the collector from running at all: for code of ours that makes no garbage."""
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
