"""What is nobody's mistake passes through: memory that ran out, and what a signal handler raised.

Code of plug-ins, of torch and of ExecuTorch runs under `except Exception`, and what it raises becomes an error of ours
that says who failed. A timeout that a signal handler raises in the middle of it is not that code's failure, and whoever
set the timeout catches its own exception. KeyboardInterrupt, SystemExit and GeneratorExit are no `Exception` at all.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType, FrameType, TracebackType

_SIGNALS = frozenset(int(number) for number in signal.valid_signals())
_STAR = 0x04  # inspect.CO_VARARGS


def let_through(error: BaseException) -> None:
    """Raise what passes through: the exception itself, or the one that others made it of.

    It is the first line of an `except Exception` clause.

    Args:
        error: What was caught.
    """
    found = passing(error)
    if found is not None:
        raise found


def passing(error: BaseException) -> BaseException | None:
    """Return what is to be raised instead of an error that blames somebody; None when there is nothing.

    Libraries catch exceptions too, and raise others: a MemoryError counts where an exception declares it as its cause,
    an interrupt wherever it led to the exception.

    Args:
        error: What was caught.
    """
    for found, declared in _chain(error):
        interrupted = isinstance(found, KeyboardInterrupt) or raised_by_handler(found)
        if interrupted or (declared and isinstance(found, MemoryError)):
            return found
    return None


def raised_by_handler(error: BaseException) -> bool:
    """Tell whether a Python signal handler raised an exception.

    In the traceback the handler's frame follows the one that was interrupted, which it got as an argument behind the
    number of the signal. A handler that no longer has its arguments is known as long as it is set.
    """
    frames = list(_frames(error.__traceback__))
    handlers = set(_registered()) if len(frames) > 1 else set()
    return any(frame.f_code in handlers or _was_given(frame, interrupted) for interrupted, frame in pairwise(frames))


def _chain(error: BaseException) -> Iterator[tuple[BaseException, bool]]:
    """Yield an exception and those that it was made of, and whether `raise ... from` declared each step to it."""
    seen: set[int] = set()
    current: BaseException | None = error
    declared = True
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current, declared
        declared = declared and current.__cause__ is not None
        current = current.__cause__ or current.__context__


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _was_given(frame: FrameType, interrupted: FrameType) -> bool:
    """Tell whether a function was called with the number of a signal and the frame that it interrupted."""
    code, values = frame.f_code, frame.f_locals
    given = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & _STAR:
        rest = values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
        given += rest if isinstance(rest, tuple) else ()
    pairs = pairwise(given)
    return any(place is interrupted and isinstance(number, int) and number in _SIGNALS for number, place in pairs)


def _registered() -> Iterator[CodeType]:
    """Yield the code of the signal handlers that are set now."""
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler):
            # A function or a method, one in a functools.partial, an object that can be called.
            for function in (handler, getattr(handler, "func", None), type(handler).__call__):
                code = getattr(function, "__code__", None)
                if isinstance(code, CodeType):
                    yield code
