"""Write files together, so that no failure or end of the process leaves one half-written; and temporary folders.

Each file is written beside its target under a name of its own (`.model.pte.1a2b3c4d.tmp`), made durable, and moved once
all are complete; the file that refers to the others goes last. Data files that replace others of the same name are new
before the program is: what lies there in between is told apart by the digests in the files (see `digests`).

A process that is killed leaves its temporary files. They are locked while they are written, so that the next save to
the same target recognises those that no process is writing any more, and removes them.

A link in the place of a file stays: what it points to is replaced, as if the file were opened for writing.

Large content goes to the disk while it is written, and leaves the system's cache then: all of it has to be durable
anyway, and a cache that grows by gigabytes costs more than writing them (measured in a virtual machine: 12.9 s of CPU
for 5 GB, 1.3 s without), and takes the place of what other programs keep there.

A temporary folder has a file that its process keeps locked. The system frees the lock when the process ends, in any
way. What is removed later is certain to be left behind by this package: a folder of this user that nobody else can
open, with our name and such a file, which names this machine and which nobody has locked. Links are not followed, and a
folder with anything but files in it stays.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import io
import os
import platform
import re
import secrets
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from exir_lowering.errors import InputError, let_through

try:
    import fcntl
except ImportError:  # Windows: no open file can be removed, and nothing is removed later
    fcntl = None  # type: ignore[assignment]

_PREFIX = "exir-lowering-"
_NAME = re.compile(_PREFIX + r"[a-z0-9_]{8}")
_LOCK = "owner.lock"


class TemporaryFolder:
    """A folder of this process, for files only, removed after a `with`, by `remove`, or with the object."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        _remove_left_behind(parent)
        self.path, lock = _make(parent)
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder; again does nothing."""
        self._end()


def _make(parent: Path) -> tuple[Path, int | None]:
    """Return a new folder and its open lock, None where locks do not work: then nobody else removes it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        if fcntl is None:
            return folder, None
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(lock, platform.node().encode())
            return folder, lock
        except OSError as error:
            os.close(lock)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):  # another process is looking at it
                shutil.rmtree(folder, ignore_errors=True)
                continue
            (folder / _LOCK).unlink(missing_ok=True)
            return folder, None


def _remove(folder: Path, lock: int | None, owner: int) -> None:
    if os.getpid() != owner:  # a forked child, which ends before its parent
        return
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        with contextlib.suppress(OSError):
            os.close(lock)


def _remove_left_behind(parent: Path) -> None:
    """Remove the folders whose process has ended."""
    if fcntl is None:
        return
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        place = _open(str(parent), os.O_DIRECTORY, stack)
        for name in os.listdir(place):
            if _NAME.fullmatch(name):
                with contextlib.suppress(OSError):
                    _remove_if_left(place, name)


def _remove_if_left(place: int, name: str) -> None:
    with contextlib.ExitStack() as stack:
        folder = _open(name, os.O_DIRECTORY | os.O_NOFOLLOW, stack, place)
        private = os.fstat(folder)
        if private.st_uid != os.geteuid() or private.st_mode & 0o077:
            return
        lock = _open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, stack, folder)
        state = os.fstat(lock)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
            return
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises an OSError while the process lives
        # Locks may be known to one machine only; without a name the process has only just made it.
        if os.read(lock, 4096) != platform.node().encode() or not platform.node():
            return
        files = os.listdir(folder)
        if any(stat.S_ISDIR(os.stat(one, dir_fd=folder, follow_symlinks=False).st_mode) for one in files):
            return
        for one in sorted(files, key=_LOCK.__eq__):  # the lock last: after a failure, the next one goes on
            os.unlink(one, dir_fd=folder)
        os.rmdir(name, dir_fd=place)


def _open(path: str, flags: int, stack: contextlib.ExitStack, folder: int | None = None) -> int:
    opened = os.open(path, flags | os.O_CLOEXEC, dir_fd=folder)
    stack.callback(os.close, opened)
    return opened


_TOKEN = 4
_ENDING = ".tmp"
_CACHED = 2**28  # bytes of a file that stay in the system's cache: a small file is read again soon
_PIECE = 2**25  # bytes that go to the disk together

Write = Callable[[BinaryIO], object]
"""Writes the content of a file."""


class Staging:
    """Files written beside their targets, and moved there together; what was not moved is removed at the end."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[Path, BinaryIO]] = {}  # by where links lead

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for temporary, file in self._files.values():
            # Removed first: once the lock is gone, another process may consider it abandoned.
            with _regardless():
                os.unlink(temporary)
            file.close()

    def add(self, target: Path, write: Write) -> Path:
        """Write a file beside its target, make it durable, and return where it is until it is moved."""
        target = _follow(target)
        _remove_unfinished(target)
        temporary, file = _create(target)
        self._files[target] = temporary, file
        write(file)
        file.flush()
        os.fsync(file.fileno())
        return temporary

    def publish(self, last: Path) -> None:
        """Move all files to their targets, in the order in which they were added, but `last` after all others."""
        last = _follow(last)
        for target in self._files:
            if target.is_dir():  # known before the first one is moved
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
        others = [target for target in self._files if target != last]
        for target in others:
            self._move(target)
        # The order has to hold on the disk, too.
        for folder in {last.parent, *(target.parent for target in others)}:
            _sync(folder)
        self._move(last)
        _sync(last.parent)

    def _move(self, target: Path) -> None:
        temporary, file = self._files[target]
        if fcntl is None:
            file.close()  # Windows moves no open file
        os.replace(temporary, target)
        file.close()
        del self._files[target]


class _Streamed(io.FileIO):
    """A file whose content beyond a size goes to the disk, and out of the system's cache, while it is written."""

    _position, _on_disk = 0, _CACHED

    def write(self, data: Any, /) -> int:
        """Write bytes: all of them, or as many as the system takes at once."""
        count = super().write(memoryview(data)[:_PIECE])
        self._position += count or 0
        if self._position - self._on_disk >= _PIECE:
            if hasattr(os, "posix_fadvise"):
                os.fdatasync(self.fileno())  # what fails here, no later call reports again
                with _regardless():
                    size = self._position - self._on_disk
                    os.posix_fadvise(self.fileno(), self._on_disk, size, os.POSIX_FADV_DONTNEED)
            self._on_disk = self._position
        return count


def replace_file(path: Path, write: Write) -> None:
    """Write a file beside its target and move it there, so that a failure leaves what was there."""
    replace_files({path: write}, path)


def replace_files(files: Mapping[Path, Write], last: Path) -> None:
    """Write files beside their targets; once all are complete, move them there in this order, but `last` at the end."""
    with Staging() as staging:
        for path, write in files.items():
            staging.add(path, write)
        staging.publish(last)


def copy_of(source: Path) -> Write:
    """Return what writes a copy of a file."""

    def write(file: BinaryIO) -> None:
        with source.open("rb") as content:
            shutil.copyfileobj(content, file)

    return write


def _follow(target: Path) -> Path:
    return Path(os.path.realpath(target))


@contextlib.contextmanager
def _regardless() -> Iterator[None]:
    """Continue when the system refuses something optional."""
    try:
        yield
    except OSError as error:
        let_through(error)


def _create(target: Path) -> tuple[Path, BinaryIO]:
    """Create a temporary file beside a target, and lock it."""
    while True:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(_TOKEN)}{_ENDING}")
        try:
            # With the mode that the process gives to its files.
            handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            continue
        file = io.BufferedWriter(_Streamed(handle, "w"))
        if fcntl is None:
            return temporary, file
        with _regardless():  # a file system without locks: then nothing is removed there either
            fcntl.flock(file, fcntl.LOCK_EX)
        # Before it was locked another process may have taken it for left behind.
        if temporary.exists():
            return temporary, file
        file.close()


def _remove_unfinished(target: Path) -> None:
    """Remove the temporary files for a target that no process is writing any more."""
    pattern = f".{glob.escape(target.name)}.{'[0-9a-f]' * (2 * _TOKEN)}{_ENDING}"
    for path in target.parent.glob(pattern):
        with _regardless():  # another process is writing it, or it is already gone
            if fcntl is None:
                path.unlink()
                continue
            with path.open("r+b") as file:  # NFS locks only what is open for writing
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _sync(folder: Path) -> None:
    """Make what was moved in a folder durable; not every system can."""
    with _regardless():
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def pte_path(path: str | os.PathLike[str]) -> Path:
    """Return where a `.pte` file goes; raise an InputError when the path does not end in `.pte`."""
    try:
        target = Path(path)
    except TypeError as error:
        raise InputError(f"Cannot save to {path!r}: expected a path that ends in .pte.") from error
    if target.suffix != ".pte":
        raise InputError(f"Cannot save to {str(target)!r}: expected a path that ends in .pte.")
    return target
