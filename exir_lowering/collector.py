"""Pausing Python's cyclic garbage collector while graphs are built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Keep the collector from running inside of the context.

    Building graphs makes many objects and no garbage, so each full collection that they trigger walks everything torch
    has loaded for nothing: up to half of the time of an extraction, at moments that depend on what ran before.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
