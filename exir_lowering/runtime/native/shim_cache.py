"""Keep a compiled library for the next process, and load one so that nobody can change it in between.

A file of the cache is the library, a mark, and the digest of the library: one file, so that it is there as a whole or
not at all. It is used when the folder and the file are this user's, nobody else may write to them, neither is a
symbolic link, and the digest is right. What was read and compared is what is loaded: from memory where the system has
files in memory (Linux), else from a copy in a folder that only this user can open. So a file that is cut off or
replaced meanwhile cannot end the process. Whoever may write as this user can of course replace anything.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from exir_lowering.pte.temporary import TemporaryFolder

_MARK = b"\0exir-lowering sha256\0"
_TRAILER = len(_MARK) + hashlib.sha256().digest_size
_LARGEST = 64 << 20
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_told: set[str] = set()


def read(folder: Path, name: str) -> bytes | None:
    """Return a library from the cache's folder; None when it has none of that name that can be trusted."""
    try:
        with _open_folder(folder) as directory:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=directory)
            try:
                content = _content(file)
            finally:
                os.close(file)
    except (OSError, _Untrusted):
        return None  # `write` replaces it, or says why nothing is kept here
    library, trailer = content[:-_TRAILER], content[-_TRAILER:]
    return library if trailer == _MARK + hashlib.sha256(library).digest() else None  # made again


def write(folder: Path, name: str, library: bytes) -> None:
    """Keep a library, where that is possible; the folder is made, and a file of that name is replaced."""
    try:
        _check_absolute(folder)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _open_folder(folder) as directory:
            _write(directory, name, library + _MARK + hashlib.sha256(library).digest())
    except (OSError, _Untrusted) as error:
        _tell(folder, error)


def load(library: bytes, symbols: Iterable[str]) -> ctypes.CDLL:
    """Load a library from its bytes; raise an OSError when it cannot be loaded, or lacks one of these functions."""
    loaded = _from_memory(library)
    if loaded is None:
        with TemporaryFolder() as folder:
            path = folder / "shim.so"
            path.write_bytes(library)
            loaded = ctypes.CDLL(str(path))
    missing = [symbol for symbol in symbols if not hasattr(loaded, symbol)]
    if missing:
        raise OSError(f"it has no function {', '.join(missing)}")
    return loaded


class _Untrusted(Exception):
    """Somebody else may write to a file or folder."""


@contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    """Open the folder, so that it stays the one that was checked."""
    _check_absolute(folder)
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(os.fstat(directory), "it")
        yield directory
    finally:
        os.close(directory)


def _check_absolute(folder: Path) -> None:
    if not folder.is_absolute():
        raise _Untrusted("its path is relative, so it would be another folder each time. Set HOME to an absolute one")


def _check(found: os.stat_result, what: str) -> None:
    if found.st_uid != os.geteuid():
        raise _Untrusted(f"{what} belongs to user {found.st_uid}, expected this user, {os.geteuid()}")
    if found.st_mode & _OTHERS_WRITE:
        raise _Untrusted(f"others may write to {what} (mode {stat.S_IMODE(found.st_mode):o}); chmod go-w")


def _content(file: int) -> bytes:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
        raise _Untrusted("the file is not a library")
    _check(found, "the library in it")
    with open(file, "rb", closefd=False) as opened:
        return opened.read(_LARGEST)


def _write(directory: int, name: str, content: bytes) -> None:
    """Write a temporary file, and rename it once it is on the disk: at any moment there is all or nothing."""
    temporary = f".{name}.{os.getpid()}.{os.urandom(4).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        with open(file, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        os.fsync(directory)
    finally:
        with suppress(OSError):  # usually it was already moved
            os.unlink(temporary, dir_fd=directory)


def _from_memory(library: bytes) -> ctypes.CDLL | None:
    """Load a library from a file in memory, None where the system has none or executes nothing there."""
    create = getattr(os, "memfd_create", None)
    if create is None:
        return None
    try:
        file: int = create("exir-lowering-shim")
    except OSError:
        return None
    try:
        with open(file, "wb", closefd=False) as opened:
            opened.write(library)
        # Left open: the loader knows libraries by their paths, so that no other file may get this number.
        return ctypes.CDLL(f"/proc/self/fd/{file}")
    except OSError:
        os.close(file)
        return None


def _tell(folder: Path, reason: Exception) -> None:
    """Say once why the cache is not used."""
    text = (
        f"Compiled code for Python delegates is not kept in {folder}: {reason}. It is compiled again in each process."
    )
    if text not in _told:
        _told.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=5)
