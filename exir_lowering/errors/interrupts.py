"""Exceptions that pass through because no one is to blame: out of memory, and those of signal handlers.

Code of plug-ins, torch and ExecuTorch runs under `except Exception`, and what it raises becomes an error of ours, which
says who failed. If a signal handler raises a timeout in the middle of that code, the code has not failed, and whoever
set the timeout expects its own exception. KeyboardInterrupt, SystemExit and GeneratorExit are not `Exception`s anyway.
"""

from __future__ import annotations

import inspect
import signal
import traceback
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType, FrameType

_SIGNALS = frozenset(int(number) for number in signal.valid_signals())


def let_through(error: BaseException) -> None:
    """Raise what passes through: the exception itself, or the one that led to it.

    This is the first line of every `except Exception` clause.

    Args:
        error: The exception that was caught.
    """
    found = find_passing(error)
    if found is not None:
        raise found


def find_passing(error: BaseException) -> BaseException | None:
    """Return the exception to raise instead of an error that blames someone, or None.

    A library may have caught it: a MemoryError counts as a declared cause, an interrupt if it led there in any way.
    """
    for found, declared in list_causes(error):
        interrupted = isinstance(found, KeyboardInterrupt) or raised_by_handler(found)
        if interrupted or (declared and isinstance(found, MemoryError)):
            return found
    return None


def raised_by_handler(error: BaseException) -> bool:
    """Return whether a Python signal handler, which is set or still holds its arguments, raised an exception."""
    # In the traceback, it follows the interrupted frame, which it got as an argument after the signal's number.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    handlers = set(_list_registered()) if len(frames) > 1 else set()
    return any(frame.f_code in handlers or _was_given(frame, interrupted) for interrupted, frame in pairwise(frames))


def list_causes(error: BaseException) -> Iterator[tuple[BaseException, bool]]:
    """Yield an exception and those that led to it, each with whether `raise ... from` declared every step to it."""
    seen: set[int] = set()
    current: BaseException | None = error
    declared = True
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current, declared
        declared = declared and current.__cause__ is not None
        current = current.__cause__ or current.__context__


def _was_given(frame: FrameType, interrupted: FrameType) -> bool:
    """Return whether a function was called with the number of a signal and the interrupted frame."""
    names, star, _, values = inspect.getargvalues(frame)
    rest = values.get(star) if star is not None else None
    given = [*(values.get(name) for name in names), *(rest if isinstance(rest, tuple) else ())]
    pairs = pairwise(given)
    return any(place is interrupted and isinstance(number, int) and number in _SIGNALS for number, place in pairs)


def _list_registered() -> Iterator[CodeType]:
    """Yield the code of the signal handlers that are currently set."""
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler):
            # A function or method, one wrapped in functools.partial, or a callable object.
            for function in (handler, getattr(handler, "func", None), type(handler).__call__):
                code = getattr(function, "__code__", None)
                if isinstance(code, CodeType):
                    yield code
