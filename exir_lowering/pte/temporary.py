"""Temporary folders that are removed even if their process is killed: by itself, or by the next to make one.

A folder has a file that its process keeps locked. The system frees the lock when the process ends, in any way. What
is removed later is certain to be left behind by this package: a folder of this user that nobody else can open, with our
name and such a file, which names this machine and which nobody has locked. Links are not followed, and a folder with
anything but files in it stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import shutil
import stat
import tempfile
import weakref
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: nothing is removed later
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
