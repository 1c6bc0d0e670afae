"""Keeping Python's cyclic garbage collector from walking over everything again and again while graphs are built."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def heap_frozen() -> Iterator[Callable[[], None]]:
    """Set aside what is alive: inside of the context, the collector looks at new objects only.

    Building graphs makes many objects and little garbage, which triggers full collections. Each walks all that torch
    has loaded, a million objects, and costs as much as lowering hundreds of partitions, at moments that depend on what
    ran before. Backends gain too: their passes rebuild graphs dozens of times.

    The value is a function that sets aside what has been made since, for objects that will stay alive.
    """
    if gc.get_freeze_count():  # somebody froze the heap already and will want it to stay so
        yield lambda: None
        return
    gc.freeze()
    try:
        yield gc.freeze
    finally:
        gc.unfreeze()


@contextmanager
def paused() -> Iterator[None]:
    """Keep the collector from running at all: for code of ours that makes no garbage."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
