"""The locks of the process, and what happens to them in a forked child.

There are two: one for conversions (everything that goes through torch's and ExecuTorch's tracing, whose state is
global), one for the engines that run programs. A thread that needs both takes that of conversions first. Both are
reentrant. `with conversion():` takes a lock that is implemented in C, so that no interrupt can leave it locked.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import FrameType
from typing import Any, TypeAlias, TypeVar

Lock: TypeAlias = Any  # threading.RLock is a function

_PAUSE = 0.01
"""Seconds between two attempts to take a lock."""

_PATIENCE = 60.0
"""Seconds after which a warning says what a thread waits for."""

_LOG = logging.getLogger(__name__)


class _Locks:
    """The current locks; a forked child has others."""

    def __init__(self) -> None:
        # the lock of conversions, then those of threads that the holder of the previous one waits for
        self.conversions: list[Lock] = [threading.RLock()]
        self.engine: Lock = threading.RLock()
        self.epoch = 0  # how often the engines' lock was renewed


_locks = _Locks()


def conversion() -> Lock:
    """Return the lock to hold while torch or ExecuTorch convert, trace or rewrite graphs, or a plug-in may do so.

    It waits until the lock is free; `with` then takes it. A thread that the holder itself waits for (it joins the
    thread, waits for the result of a future that the thread computes, or for the engines or Dynamo while the thread has
    them) would wait forever: it gets a lock of its own instead, since the holder does nothing in the meantime.
    """
    told = time.monotonic() + _PATIENCE
    while True:
        found = _free()
        if found is not None:
            return found
        time.sleep(_PAUSE)
        if time.monotonic() > told:
            told = float("inf")
            _tell()


def engine() -> Lock:
    """Return the lock to hold while an engine is used.

    ExecuTorch's runtime must not be entered by two threads: a delegate that runs Python code releases the
    interpreter's lock. The same thread may enter again: a delegate may run a program of its own.
    """
    return _locks.engine


def epoch() -> int:
    """Return how often this process and its parents were forked while another thread had the engines' lock."""
    return _locks.epoch


def owner(lock: Lock) -> int | None:
    """Return the thread that holds a lock, None if it is free; only the lock's `repr` shows it."""
    found = re.search(r"owner=(\d+)", repr(lock))
    return int(found[1]) or None if found else None


def _tell() -> None:
    """Log where the thread is that holds the lock of conversions: it may wait for this one, as only users can see."""
    holder = owner(_locks.conversions[-1]) or owner(_locks.conversions[0])
    frame = sys._current_frames().get(holder or 0)
    if frame is not None:
        _LOG.warning(
            "Lowering has waited %.0f seconds for another thread, which is converting, at this line. If a plug-in "
            'there waits for this thread, both wait forever: declare its backend parallel = "thread".\n%s',
            _PATIENCE,
            "".join(traceback.format_stack(frame)[-4:]),
        )


def _free() -> Lock | None:
    """Return the lock that this thread may take, None if it has to wait."""
    me = threading.get_ident()
    holder: int | None = None
    for lock in list(_locks.conversions):
        owned_by = owner(lock)
        if holder is not None and not _waits_for(holder, me) and (owned_by is None or not _waits_for(holder, owned_by)):
            return None
        if owned_by in (None, me):
            return lock
        holder = owned_by
    if holder is None or not _waits_for(holder, me):
        return None
    _locks.conversions.append(threading.RLock())
    return _locks.conversions[-1]


def _waits_for(thread: int, other: int) -> bool:
    """Return whether a thread waits for another one: to end, to set a future's result, to leave engines or Dynamo."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return False
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is not None and frame.f_code.co_filename == dynamo.__file__:
        return owner(dynamo.compile_lock) == other and _stands_still(thread, frame)
    if frame.f_code in _USES_ENGINE:
        return owner(_locks.engine) == other and _stands_still(thread, frame)
    for caller in _outwards(frame, 4):
        if caller.f_code in _JOINS:
            joined = caller.f_locals.get("self")
            return isinstance(joined, threading.Thread) and joined.ident == other
        if caller.f_code is Future.result.__code__:
            future = caller.f_locals.get("self")
            return isinstance(future, Future) and not future.done() and _works_for(other, future)
    return False


_JOINS = {
    getattr(threading.Thread, name).__code__
    for name in ("join", "_wait_for_tstate_lock")
    if hasattr(threading.Thread, name)
}
_USES_ENGINE: set[Any] = set()


_Function = TypeVar("_Function", bound=Callable[..., Any])


def uses_engine(function: _Function) -> _Function:
    """Mark a function that takes the engines' lock: a thread whose innermost call it is waits for the lock."""
    _USES_ENGINE.add(function.__code__)
    return function


def _stands_still(thread: int, frame: FrameType) -> bool:
    at = frame.f_lasti
    time.sleep(2 * _PAUSE)
    return sys._current_frames().get(thread) is frame and frame.f_lasti == at


def _works_for(thread: int, future: Future[Any]) -> bool:
    """Return whether a pool's thread is executing the call that a future stands for."""
    return any(
        getattr(frame.f_locals.get("self"), "future", None) is future
        for frame in _outwards(sys._current_frames().get(thread), sys.getrecursionlimit())
        if frame.f_globals.get("__name__") == "concurrent.futures.thread"
    )


def _outwards(frame: FrameType | None, most: int) -> Iterator[FrameType]:
    while frame is not None and most:
        yield frame
        frame, most = frame.f_back, most - 1


Change: TypeAlias = Callable[[], object]
"""Makes a global change, or undoes it; to undo it twice, or before it was made, does no harm."""


class Shared:
    """A global change that lasts as long as any thread needs it.

    In a forked child, the threads of the parent are gone, except the one that forked: the change ends there unless that
    one needs it. An interrupt, which can come after any call, leaves nothing half made or half undone.
    """

    def __init__(self, prepare: Callable[[], tuple[Change, Change]]) -> None:
        """Describe the change: `prepare` returns what makes it and what undoes it, and changes nothing itself."""
        self._prepare, self._lock = prepare, threading.Lock()
        self._users: list[int] = []
        self._undo: Change | None = None
        _shared.add(self)

    def __enter__(self) -> None:
        others = self._users.count(threading.get_ident())
        try:
            # The lock is only held while the change is made, never while a caller's code runs.
            with self._lock:
                if self._undo is None:
                    self._begin()
                self._users.append(threading.get_ident())
        except BaseException:
            self._leave(others)
            raise

    def __exit__(self, *error: object) -> None:
        others = None
        try:
            others = self._users.count(threading.get_ident()) - 1
            self._leave(others)
        except BaseException:
            self._leave(self._users.count(threading.get_ident()) - 1 if others is None else others)
            raise

    def _begin(self) -> None:
        change, undo = self._prepare()
        try:
            change()
        except BaseException:
            undo()
            raise
        self._undo = undo

    def _leave(self, others: int) -> None:
        """End the change for this thread except where it needs it otherwise, a number of times."""
        with self._lock:
            while self._users.count(threading.get_ident()) > others:
                self._users.remove(threading.get_ident())
            self._end()

    def _end(self) -> None:
        if not self._users and self._undo is not None:
            try:
                self._undo()
            except BaseException:
                self._undo()
                raise
            finally:
                self._undo = None

    def forked(self) -> None:
        """Forget the threads that a forked child does not have."""
        self._lock = threading.Lock()
        self._users = [user for user in self._users if user == threading.get_ident()]
        self._end()


_shared: weakref.WeakSet[Shared] = weakref.WeakSet()
_restored: list[Callable[[], object]] = []


def restore_in_child(restore: Callable[[], object]) -> None:
    """Call a function in a forked child if another thread was converting when it was forked."""
    _restored.append(restore)


def _in_child() -> None:
    me = threading.get_ident()
    converting = owner(_locks.conversions[0])
    if converting not in (None, me):
        for restore in _restored:
            restore()
    if converting != me:
        _locks.conversions = [threading.RLock()]
    if owner(_locks.engine) != me:
        _locks.epoch += owner(_locks.engine) is not None
        _locks.engine = threading.RLock()
    for shared in list(_shared):
        shared.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
