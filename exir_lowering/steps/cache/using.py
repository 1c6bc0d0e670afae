"""The cache during one call of the compiler: its store, and what it did."""

from __future__ import annotations

import os
import stat
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exir_lowering.errors import CacheWarning, InputError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.plans.lowering_plan import CacheUse
from exir_lowering.steps.cache.canonical_values import Storages
from exir_lowering.steps.cache.keys import Key
from exir_lowering.steps.cache.store import DEFAULT_LIMIT, Found, Store

FOLDER = "EXIR_LOWERING_CACHE"
"""The environment variable that names a folder, instead of the one in the user's cache."""

LIMIT = "EXIR_LOWERING_CACHE_BYTES"
"""The environment variable that says how many bytes a cache keeps."""


def find_folder(option: str | os.PathLike[str] | bool = True) -> Path:
    """Return the folder of a cache; True stands for that of the user."""
    if not isinstance(option, bool):
        return Path(option)
    if os.environ.get(FOLDER):
        return Path(os.environ[FOLDER])
    import platformdirs  # only where the user's folder is used

    return platformdirs.user_cache_path("exir-lowering", appauthor=False) / "lowered"


def find_limit() -> int:
    """Return how many bytes a cache keeps; InputError if the environment variable is not a number."""
    text = os.environ.get(LIMIT, "")
    if not text:
        return DEFAULT_LIMIT
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InputError(f"The environment variable {LIMIT} is {text!r}, expected a number of bytes.")
    return int(text)


class Cache:
    """The cache of one call, by `LoweringOptions.cache`. A store that fails is a warning, and then there is none."""

    def __init__(self, option: str | os.PathLike[str] | bool) -> None:
        self.storages = Storages()
        self.uses: list[CacheUse] = []
        self._known: dict[str, list[Mapping[str, str]]] = {}
        self._lock = threading.Lock()
        self._store: Store | None = None
        if option is not False:
            limit, folder = find_limit(), find_folder(option)
            try:
                self._store = Store(folder, limit)
                _warn_of_others(folder)
            except OSError as error:
                let_through(error)
                self._give_up(folder, error)

    @property
    def active(self) -> bool:
        """Whether there is a store."""
        return self._store is not None

    def read(self, key: Key) -> Found | None:
        """Return the value for a key, None if there is none."""
        return None if self._store is None else self._store.read(key)

    def write(self, key: Key, value: Any, chunks: Sequence[bytes]) -> None:
        """Keep a value for a key."""
        store = self._store
        if store is not None:
            try:
                store.write(key, value, chunks)
            except OSError as error:
                let_through(error)
                self._give_up(store.folder, error)

    def hit(self, key: Key, method: str, partition: str = "") -> None:
        """Note that a result was taken from the cache."""
        self._note(key.kind, method, partition, True)

    def miss(self, key: Key, method: str, partition: str = "") -> None:
        """Note that a result was not there, and how its key differs from the nearest one."""
        differs: tuple[str, ...] = ()
        if self._store is not None:
            with self._lock:
                known, nearest = self._store.find_nearest(key, self._known.get(key.kind))
                self._known[key.kind] = known
            differs = key.differs(known[nearest]) if nearest >= 0 else ()
        self._note(key.kind, method, partition, False, differs)

    def refuse(self, kind: str, method: str, partition: str, reason: str) -> None:
        """Note that something has no key."""
        if self.active:
            self._note(kind, method, partition, False, (), reason)

    def _note(self, kind: Any, *facts: Any) -> None:
        self.uses.append(CacheUse(kind, *facts))

    def _give_up(self, folder: Path, error: OSError) -> None:
        self._store = None
        warnings.warn(
            f"The cache in {str(folder)!r} is not used: {error.strerror or error}. Give another folder as cache=, or "
            "make room; the result is the same without it.",
            CacheWarning,
            stacklevel=2,
        )


def _warn_of_others(folder: Path) -> None:
    if os.name == "posix" and folder.stat().st_mode & stat.S_IWOTH:
        warnings.warn(
            f"Every user of this machine can write to the cache in {str(folder)!r}, and so put other payloads into "
            "your files: `chmod o-w` it, or give another folder as cache=.",
            CacheWarning,
            stacklevel=2,
        )
