"""The locks of the process, what is replaced in upstream's code meanwhile, and what a forked child does with both.

There are two: one for conversions (everything that goes through torch's and ExecuTorch's tracing, whose state is
global), one for the engines that run programs. A thread that needs both takes that of conversions first. Both are
reentrant. `with conversion():` takes a lock that is implemented in C, so that no interrupt can leave it locked.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from inspect import getattr_static
from types import FunctionType
from typing import Any, TypeAlias, TypeVar

Lock: TypeAlias = Any  # threading.RLock is a function


class _Locks:
    """The current locks; a forked child has others."""

    def __init__(self) -> None:
        self.conversions: Lock = threading.RLock()
        self.engine: Lock = threading.RLock()
        self.epoch = 0  # how often the engines' lock was renewed


_locks = _Locks()


def conversion() -> Lock:
    """Return the lock to hold while graphs are traced or rewritten."""
    return _locks.conversions


def converts_here() -> bool:
    """Return whether this thread has the lock of conversions."""
    return bool(_locks.conversions._is_owned())


def engine() -> Lock:
    """Return the lock to hold while an engine is used: no two threads may enter the runtime, a delegate may again."""
    return _locks.engine


def epoch() -> int:
    """Return how often this process and its parents were forked by a thread that did not have the engines' lock."""
    return _locks.epoch


Change: TypeAlias = Callable[[], object]  # changes, or undoes it; twice, or too early, does no harm


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
                    change, undo = self._prepare()
                    try:
                        change()
                    except BaseException:
                        undo()
                        raise
                    self._undo = undo
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


collector_paused = Shared(lambda: (gc.disable, gc.enable) if gc.isenabled() else (lambda: None, lambda: None))
"""Keeps Python's cyclic garbage collector from running at all."""

_restored: list[Callable[[], object]] = []


def restore_in_child(restore: Callable[[], object]) -> None:
    """Call a function in a forked child if another thread was converting when it was forked."""
    _restored.append(restore)


def _in_child() -> None:
    """Renew the locks that the thread which forked does not have: others, that had them, are not in the child."""
    if not converts_here():
        for restore in _restored:
            restore()
        _locks.conversions = threading.RLock()
    if not _locks.engine._is_owned():
        _locks.epoch += 1
        _locks.engine = threading.RLock()
    for shared in list(_shared):
        shared.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


Value = TypeVar("Value")

_REPLACED: dict[tuple[int, str, int], tuple[Any, bool]] = {}
"""What was replaced, by the identity of its owner, its name, and the identity of what took its place; and whether that
has ended, and others may still put it back."""


def original_of(owner: Any, name: str, value: Any, *, ended: bool = False) -> Any:
    """Return what an attribute would be without `replacing`, or only what has ended: the value, unless put there."""
    while (known := _REPLACED.get((id(owner), name, id(value)))) is not None and (known[1] or not ended):
        value = known[0]
    return value


def replacing(replacements: Callable[[], Sequence[tuple[Any, str, Any]]]) -> Shared:
    """Replace attributes of upstream classes and modules as long as any thread needs it.

    Others, such as exporters in another thread, replace the same ones, and end at other times: what they have put there
    meanwhile stays, and what they put back, which may be from here, is known.
    """

    def prepare() -> tuple[Change, Change]:
        originals = [
            (owner, name, original_of(owner, name, getattr_static(owner, name), ended=True), new)
            for owner, name, new in replacements()
        ]

        def replace() -> None:
            for owner, name, original, new in originals:
                _REPLACED[id(owner), name, id(new)] = original, False
                setattr(owner, name, new)

        def restore() -> None:
            for owner, name, original, new in originals:
                key = id(owner), name, id(new)
                if vars(owner).get(name) is new:
                    setattr(owner, name, original)
                elif isinstance(new, FunctionType) and key in _REPLACED:
                    _REPLACED[key] = original, True
                    weakref.finalize(new, _REPLACED.pop, key, None)
                    continue
                _REPLACED.pop(key, None)

        return replace, restore

    return Shared(prepare)


@contextmanager
def during(variable: ContextVar[Any], value: Value, change: AbstractContextManager[None]) -> Iterator[Value]:
    """Set a variable of this thread, and make a change that all threads share, while the context lasts."""
    before = variable.get()
    try:
        variable.set(value)
        with change:
            yield value
    finally:
        variable.set(before)
