"""The store of the cache: files in one folder, named by the digests of their keys and contents.

An entry is a small file with its key's parts and a description of the value; long chunks are separate files, named
by their content, which entries share. Files are written under temporary names and moved into place, so that readers in
other processes, and those after a kill, find whole ones or none. Nothing relies on it: each file is checked against a
digest when it is read, and what is not right in any way is a miss, and removed. No value is code, or becomes any.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
import struct
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exir_lowering.errors import CacheWarning, InputError
from exir_lowering.plans.report import CacheUse
from exir_lowering.steps.cache.keys import FORMAT, Key, Storages

DEFAULT_LIMIT = 8 << 30  # how many bytes a store keeps by default

_MAGIC = b"EXIRLOWC"
_HEADER = struct.Struct("<8sI32sI")  # magic, format, digest of the rest, bytes of the description
_LONG = 4096  # the bytes from which a chunk is a separate file
_MOST_DESCRIPTION = 64 << 20
_NAME = re.compile(r"(?:preprocess|edge)-[0-9a-f]{64}\.entry|[0-9a-f]{64}\.chunk")
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")
_ABANDONED = 3600.0  # the seconds after which a temporary file is one that a killed process left
_LOOKED_AT = 256  # how many entries, the latest ones, are compared to find the one nearest to a key
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


@dataclass(frozen=True, slots=True)
class Found:
    """What the store has for a key."""

    value: Any  # what JSON can hold
    chunks: tuple[bytes, ...]  # those that it refers to


@dataclass(frozen=True, slots=True)
class Content:
    """What is in a store."""

    entries: Mapping[str, int]  # how many of each kind
    size: int  # the bytes of all files
    limit: int  # the bytes that it keeps at most


class Store:
    """A folder of at most `limit` bytes of entries, for many processes and threads; OSError if it cannot be used."""

    def __init__(self, folder: Path, limit: int = DEFAULT_LIMIT) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to read and write in {str(folder)!r}")
        self.folder, self._limit = folder, limit
        self._unchecked = limit  # bytes written since the size was looked at: it is when the first entry is written

    def read(self, key: Key) -> Found | None:
        """Return the value for a key, None if there is none that is whole."""
        name = _entry_name(key)
        try:
            described = _parse(self._load(name, _MOST_DESCRIPTION))
            if described is None or described[0] != [key.kind, key.digest, dict(key.parts)]:
                self._drop(name)
                return None
            _, value, sizes, rest = described
            chunks = list(self._chunks(sizes, rest))
        except (OSError, ValueError, TypeError, RecursionError):
            self._drop(name)  # if it is not there, nothing happens
            return None
        self._touch(name)
        return Found(value, tuple(chunks))

    def _chunks(self, sizes: Any, rest: bytes) -> Iterator[bytes]:
        """Yield an entry's chunks, in it or in files; a missing or damaged one is an OSError, ValueError, TypeError."""
        at = 0
        for size, digest in sizes:
            if digest is None:
                if type(size) is not int or not 0 <= size <= len(rest) - at:
                    raise ValueError("a chunk is not there")
                yield rest[at : at + size]
                at += size
                continue
            name = f"{digest}.chunk"
            if not isinstance(digest, str) or not _NAME.fullmatch(name):
                raise ValueError("a chunk has no digest")
            content = self._load(name, self._limit)
            if len(content) != size or hashlib.sha256(content).hexdigest() != digest:
                self._drop(name)
                raise ValueError("a chunk is damaged")
            self._touch(name)
            yield content

    def write(self, key: Key, value: Any, chunks: Sequence[bytes]) -> bool:
        """Keep a value for a key; return whether it was small enough. A full disk is an OSError."""
        sizes = [(len(one), hashlib.sha256(one).hexdigest() if len(one) >= _LONG else None) for one in chunks]
        description = json.dumps([[key.kind, key.digest, dict(key.parts)], value, sizes]).encode()
        if sum(map(len, chunks)) + len(description) > self._limit // 2 or len(description) > _MOST_DESCRIPTION // 2:
            return False
        for chunk, (_, digest) in zip(chunks, sizes, strict=True):
            if digest is not None and not self._touch(f"{digest}.chunk", len(chunk)):
                self._save(f"{digest}.chunk", [chunk])
        content = [description, *(chunk for chunk in chunks if len(chunk) < _LONG)]
        checksum = hashlib.sha256(b"".join([struct.pack("<I", len(description)), *content])).digest()
        self._save(_entry_name(key), [_HEADER.pack(_MAGIC, FORMAT, checksum, len(description)), *content])
        return True

    def find_nearest(self, key: Key, known: list[Mapping[str, str]] | None) -> tuple[list[Mapping[str, str]], int]:
        """Return the parts of the latest keys of a kind, `known` if read before, and which is nearest, -1 if none."""
        if known is None:
            files = sorted(self._files(), key=lambda file: file[1].st_mtime_ns, reverse=True)
            names = [name for name, _ in files if name.startswith(f"{key.kind}-")]
            known = [parts for name in names[:_LOOKED_AT] if (parts := self._parts(name)) is not None]
        same = [sum(parts.get(name) == digest for name, digest in key.parts.items()) for parts in known]
        return known, max(range(len(same)), key=same.__getitem__, default=-1)

    def _parts(self, name: str) -> Mapping[str, str] | None:
        """Return the parts of an entry's key, which may be anything else if the entry is damaged."""
        try:
            described = _parse(self._load(name, _MOST_DESCRIPTION))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        parts = described[0][2] if described is not None and len(described[0]) == 3 else None
        return parts if isinstance(parts, dict) else None

    def content(self) -> Content:
        """Return what is in the store."""
        files = list(self._files())
        kinds = ("edge", "preprocess")
        entries = {kind: sum(name.startswith(f"{kind}-") for name, _ in files) for kind in kinds}
        return Content(entries, sum(found.st_size for _, found in files), self._limit)

    def clear(self) -> int:
        """Remove all entries; return how many bytes that were. Files of others in the folder stay."""
        removed = 0
        for name, found in self._files(temporary=True):
            removed += found.st_size
            self._drop(name)
        return removed

    def trim(self) -> None:
        """Bring a store over its limit to nine tenths of it: what was not used for longest is removed."""
        self._unchecked = 0
        now = time.time()
        files = []
        for name, found in self._files(temporary=True):
            if _TEMPORARY.fullmatch(name):
                if now - found.st_mtime > _ABANDONED:
                    self._drop(name)
            else:
                files.append((name, found))
        size = sum(found.st_size for _, found in files)
        if size <= self._limit:
            return
        for name, found in sorted(files, key=lambda file: file[1].st_mtime_ns):
            if size <= self._limit * 9 // 10:
                break
            self._drop(name)
            size -= found.st_size

    def _files(self, *, temporary: bool = False) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the store's files; others in the folder, and what is not a file, are not among them."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as found:
            for file in found:
                if _NAME.fullmatch(file.name) or (temporary and _TEMPORARY.fullmatch(file.name)):
                    with contextlib.suppress(OSError):
                        state = file.stat(follow_symlinks=False)
                        if not stat.S_ISDIR(state.st_mode):
                            yield file.name, state

    def _load(self, name: str, most: int) -> bytes:
        """Read a file of the store; OSError if there is none or it is a link, ValueError if not regular or too long."""
        handle = os.open(self.folder / name, _READ)
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_size > most:
                raise ValueError(f"{name} is not a file of the store")
            content = file.read(found.st_size)
        return content

    def _save(self, name: str, content: Sequence[bytes]) -> None:
        """Write a file under a temporary name, and move it into place; OSError if it cannot be written."""
        temporary = self.folder / f".{secrets.token_hex(8)}.tmp"
        try:
            with os.fdopen(os.open(temporary, _WRITE, 0o600), "wb") as file:
                for part in content:
                    file.write(part)
            os.replace(temporary, self.folder / name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self._unchecked += sum(map(len, content))
        if self._unchecked > self._limit // 10:
            self.trim()

    def _touch(self, name: str, size: int | None = None) -> bool:
        """Note that a file is used; return whether it is there, and has a size."""
        try:
            found = os.stat(self.folder / name, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode) or (size is not None and found.st_size != size):
                return False
            os.utime(self.folder / name, follow_symlinks=False)
        except (OSError, NotImplementedError):
            return False
        return True

    def _drop(self, name: str) -> None:
        """Remove a file of the store, as far as that is possible: a link, not what it leads to."""
        with contextlib.suppress(OSError):
            os.unlink(self.folder / name)


def _entry_name(key: Key) -> str:
    return f"{key.kind}-{key.digest}.entry"


def _parse(content: bytes) -> tuple[list[Any], Any, Any, bytes] | None:
    """Return an entry's key, value, chunk sizes and own chunks; None, or an error that `read` knows, for damage."""
    if len(content) < _HEADER.size:
        return None
    magic, version, digest, length = _HEADER.unpack_from(content)
    if magic != _MAGIC or version != FORMAT or length > len(content) - _HEADER.size:
        return None
    if hashlib.sha256(memoryview(content)[_HEADER.size - 4 :]).digest() != digest:
        return None
    key, value, sizes = json.loads(content[_HEADER.size : _HEADER.size + length])
    if not isinstance(key, list) or not isinstance(sizes, list):
        return None
    return key, value, sizes, content[_HEADER.size + length :]


FOLDER = "EXIR_LOWERING_CACHE"  # the environment variable that names a folder, instead of the one in the user's cache
LIMIT = "EXIR_LOWERING_CACHE_BYTES"  # the environment variable that says how many bytes a cache keeps


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
