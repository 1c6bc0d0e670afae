"""Files that are read in place: mapped, not copied, and noticed when another file has taken their path."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from exir_lowering.errors import InputError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.pte import kinds
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.kinds import Kind

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class MappedFile:
    """A file, or the content of one."""

    name: str  # what messages call it
    source: str | bytes  # its path, or its content
    content: memoryview  # not copied, and not to be written to
    identity: tuple[int, ...] | None  # which file it was when it was opened; None for content

    def parse(self, parse: Callable[[memoryview], Result], expected: Kind) -> Result:
        """Return what a function parses the file into; an empty file, or its CorruptError, is an InputError."""
        if not self.content:
            raise InputError(f"{self.name} cannot be loaded: it is empty.")
        try:
            return parse(self.content)
        except CorruptError as error:
            # Without the cause, whose frames would keep the file mapped.
            message = str(error)
        kind = kinds.kind_of_content(self.content)
        if kind is not None and kind is not expected:
            advice = kind.advice if expected is kinds.PTE else "Give the one that was saved with the program."
            raise InputError(f"{self.name} cannot be loaded: it is {kind.name}, expected {expected.short}. {advice}")
        raise InputError(
            f"{self.name} cannot be loaded: it is damaged, or not what ExecuTorch writes: {message}. Make or copy it "
            "again."
        )

    def writable(self) -> memoryview:
        """Return the content so that writing to it changes no file; InputError if the file was replaced or changed."""
        if isinstance(self.source, bytes):
            return memoryview(bytearray(self.source))
        content, identity = _map(self.name, Path(self.source), mmap.ACCESS_COPY)
        if identity != self.identity:
            raise self._replacement_error()
        return content

    def check(self, what: str = "program") -> None:
        """Check that the path still leads to this file, as it was; else raise an InputError that says what to load."""
        if self.identity is None:
            return
        try:
            now = _identity(os.stat(self.source))
        except OSError as error:
            let_through(error)
            raise InputError(f"{self.name} can no longer be read: {error}. Load the {what} again.") from error
        if now != self.identity:
            raise self._replacement_error(what)

    def _replacement_error(self, what: str = "program") -> InputError:
        return InputError(
            f"{self.name} was replaced or changed while it was in use: it may hold another model. Load the {what} "
            "again."
        )


def open_file(given: object, who: str, expected: str, kind: str) -> MappedFile:
    """Open a path or content for `who`, which begins messages; InputError unless it is `expected`, and can be read."""
    if isinstance(given, (bytes, bytearray, memoryview)):
        return in_memory(f"the {kind} content of {len(given)} bytes", bytes(given))
    if not isinstance(given, (str, os.PathLike)):
        raise InputError(f"{who}: got a {type(given).__name__}, expected {expected}.")
    path = os.fsdecode(given)
    location, name = Path(path), repr(path)
    if not location.exists():
        raise InputError(f"{name} cannot be loaded: there is no such file.")
    if not location.is_file():
        found = "a directory" if location.is_dir() else "not a regular file"
        raise InputError(f"{name} cannot be loaded: it is {found}.")
    content, identity = _map(name, location, mmap.ACCESS_READ)
    return MappedFile(name, path, content, identity)


def in_memory(name: str, content: bytes) -> MappedFile:
    """Return content that does not come from a file on the disk; messages call it by the name."""
    return MappedFile(name, content, memoryview(content), None)


def _map(name: str, path: Path, access: int) -> tuple[memoryview, tuple[int, ...]]:
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = memoryview(mmap.mmap(file.fileno(), 0, access=access) if found.st_size else b"")
            return content, _identity(found)
    except (OSError, ValueError) as error:
        let_through(error)
        raise InputError(f"{name} cannot be loaded: {error}.") from error


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
