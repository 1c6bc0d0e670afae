"""Write files together, so that no failure or end of the process leaves one half-written; and temporary folders.

Each file is written beside its target under a name of its own (`.model.pte.1a2b3c4d.tmp`), made durable, and moved once
all are complete; the file that refers to the others goes last. Data files that replace others of the same name are new
before the program is: what lies there in between is told apart by the digests in the files (see `digests`). A process
that is killed leaves its temporary files.

A link in the place of a file stays: what it points to is replaced, as if the file were opened for writing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from exir_lowering.errors import InputError


class TemporaryFolder:
    """A folder of this process, removed after a `with`, by `remove`, or with the object."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="exir-lowering-"))
        self._end = weakref.finalize(self, _remove, self.path, os.getpid())

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder; again does nothing."""
        self._end()


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not a forked child, which ends before its parent
        shutil.rmtree(folder, ignore_errors=True)


Write = Callable[[BinaryIO], object]
"""Writes the content of a file."""


def replace_file(path: Path, write: Write) -> None:
    """Write a file beside its target and move it there, so that a failure leaves what was there."""
    replace_files({path: write}, path)


def replace_files(files: Mapping[Path, Write], last: Path) -> None:
    """Write files beside their targets; once all are complete, move them there in this order, but `last` at the end."""
    staged: dict[Path, Path] = {}  # where each is until it is moved, by where links lead
    last = Path(os.path.realpath(last))
    try:
        for path, write in files.items():
            target = Path(os.path.realpath(path))
            # Known before it is there, so that an interrupt leaves nothing.
            temporary = staged[target] = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
            # With the mode that the process gives to its files.
            handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            with os.fdopen(handle, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
        for target in staged:
            if target.is_dir():  # known before the first one is moved
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
        folders = {target.parent for target in staged}
        for target in sorted(staged, key=lambda target: target == last):
            if target == last:  # the order has to hold on the disk, too
                for folder in folders:
                    _sync(folder)
            os.replace(staged[target], target)
            del staged[target]
        _sync(last.parent)
    finally:
        for temporary in staged.values():
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def copy_of(source: Path) -> Write:
    """Return what writes a copy of a file."""

    def write(file: BinaryIO) -> None:
        with source.open("rb") as content:
            shutil.copyfileobj(content, file)

    return write


def _sync(folder: Path) -> None:
    """Make what was moved in a folder durable; not every system can."""
    with contextlib.suppress(OSError):
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
    if target.suffix != ".pte" or "\0" in str(target):
        null = ", without a null character" if "\0" in str(target) else ""
        raise InputError(f"Cannot save to {str(target)!r}: expected a path that ends in .pte{null}.")
    if not target.parent.is_dir():
        missing = f"there is no directory {str(target.parent)!r}. Create it first."
        raise InputError(f"Cannot save to {str(target)!r}: {missing}")
    return target
