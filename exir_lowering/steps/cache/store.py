"""The cache of a call: files named by digests of keys, with pickles of closed types; what is not right is a miss."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import PicklingError
from typing import Any

from exir_lowering._upstream.delegates import dump_results, load_results
from exir_lowering.errors import CacheWarning, InputError, ignoring_errors
from exir_lowering.plans.report import CacheUse
from exir_lowering.steps.cache.keys import Storages

FOLDER = "EXIR_LOWERING_CACHE"  # the environment variable that names a folder, instead of the one in the user's cache
LIMIT = "EXIR_LOWERING_CACHE_BYTES"  # the environment variable that says how many bytes a cache keeps

_NAME = re.compile(r"[0-9a-f]{64}\.entry|\.[0-9a-f]{16}\.tmp")


class Store:
    """A folder of at most `limit` bytes, for many processes and threads; OSError if it cannot be used."""

    def __init__(self, folder: Path, limit: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to read and write in {str(folder)!r}")
        self.folder, self.limit = folder, limit

    def read(self, key: str, count: int) -> list[Any] | None:
        """Return so many results for a key, None if there are none that are whole."""
        path = self.folder / f"{key}.entry"
        with ignoring_errors():  # there is none, or whatever a damaged one, or one of another version, leads to
            stored, results = path.read_bytes().split(b"\n", 1)
            if hashlib.sha256(results).hexdigest() == stored.decode():
                found = load_results(results, count)
                os.utime(path)
                return found
        with suppress(OSError):
            path.unlink()
        return None

    def write(self, key: str, results: Sequence[Any]) -> str:
        """Keep results for a key; return why that cannot be, or "". A full disk is an OSError."""
        try:
            content = dump_results(results)
        except PicklingError as error:
            return str(error)
        if len(content) > self.limit // 2:
            return f"a result has {len(content)} bytes, and the cache at most {self.limit}"
        temporary = self.folder / f".{secrets.token_hex(8)}.tmp"
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(hashlib.sha256(content).hexdigest().encode() + b"\n")
                file.write(content)
            os.replace(temporary, self.folder / f"{key}.entry")
        finally:
            temporary.unlink(missing_ok=True)
        return ""

    def files(self) -> list[tuple[Path, os.stat_result]]:
        """Return the store's files, the one that was not used for longest first; others in the folder stay."""
        found = []
        for path in self.folder.glob("*"):
            if _NAME.fullmatch(path.name):
                with suppress(OSError):
                    found.append((path, path.lstat()))
        return sorted(found, key=lambda file: file[1].st_mtime_ns)

    def trim(self, most: int | None = None) -> int:
        """Remove what was not used for longest, down to so many bytes, or to the limit; return how many that were."""
        files = self.files()
        size = left = sum(state.st_size for _, state in files)
        for path, state in files:
            if left > (self.limit if most is None else most):
                left -= state.st_size
                with suppress(OSError):
                    path.unlink()
        return size - left


def find_folder(option: str | os.PathLike[str] | bool = True) -> Path:
    """Return the folder of a cache; True stands for that of the user."""
    if not isinstance(option, bool) or os.environ.get(FOLDER):
        return Path(os.environ[FOLDER] if isinstance(option, bool) else option)
    import platformdirs  # only where the user's folder is used

    return platformdirs.user_cache_path("exir-lowering", appauthor=False) / "lowered"


def find_limit() -> int:
    """Return how many bytes a cache keeps; InputError if the environment variable is not a number."""
    text = os.environ.get(LIMIT) or str(8 << 30)
    if not text.isdecimal():
        raise InputError(f"The environment variable {LIMIT} is {text!r}, expected a number of bytes.")
    return int(text)


class Cache:
    """The cache of one call, by `LoweringOptions.cache`. A store that fails is a warning, and then there is none."""

    def __init__(self, option: str | os.PathLike[str] | bool) -> None:
        self.storages: Storages = {}
        self.uses: list[CacheUse] = []
        self.store: Store | None = None
        if option is not False:
            folder, limit = find_folder(option), find_limit()
            with self.guard(folder):
                self.store = Store(folder, limit)

    @contextmanager
    def guard(self, folder: Path) -> Iterator[None]:
        """Do without the store if it fails."""
        try:
            yield
        except OSError as error:
            self.store = None
            warnings.warn(
                f"The cache in {str(folder)!r} is not used: {error.strerror or error}. Give another folder as cache=, "
                "or make room; the result is the same without it.",
                CacheWarning,
                stacklevel=2,
            )
