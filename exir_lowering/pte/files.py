"""Files as they are given: mapped, not copied; told apart by how they begin; data files, put together."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from exir_lowering._upstream.writing import write_data
from exir_lowering.errors import InputError
from exir_lowering.pte import container
from exir_lowering.pte.container import Weight
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.kinds import PTD as PTD, PTE as PTE, Kind, kind_of as kind_of
from exir_lowering.pte.saving import TemporaryFolder

Result = TypeVar("Result")

DATA_KEY = "exir_lowering.digest/"
"""What the key of a `.ptd` file's digests starts with; the file's own digest follows, in hexadecimal."""


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
        kind = kind_of(self.source)
        if kind is not None and kind is not expected:
            advice, short = kind.advice, expected.name.partition(",")[0]
            advice = advice if expected is PTE else "Give the one that was saved with the program."
            raise InputError(f"{self.name} cannot be loaded: it is {kind.name}, expected {short}. {advice}")
        raise InputError(
            f"{self.name} cannot be loaded: it is damaged, or not what ExecuTorch writes: {message}. Make or copy it "
            "again."
        )

    def release(self) -> None:
        """Give the pages that were read back to the system, which reads them again when they are needed."""
        mapped = self.content.obj
        if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)

    def check(self) -> None:
        """Check that the path still leads to this file, as it was; else raise an InputError."""
        if self.identity is None:
            return
        try:
            now = _identity(os.stat(self.source))
        except OSError as error:
            raise InputError(f"{self.name} can no longer be read: {error}. Load the program again.") from error
        if now != self.identity:
            raise InputError(
                f"{self.name} was replaced or changed while it was in use: it may hold another model. Load the program "
                "again."
            )


def is_file(given: object) -> bool:
    """Return whether a value is a path or the content of a file, rather than what was made in this process."""
    return isinstance(given, (bytes, bytearray, memoryview, str, os.PathLike))


def open_file(given: object, who: str, expected: str, kind: str) -> MappedFile:
    """Open a path or content for `who`, which begins messages; InputError unless it is `expected`, and can be read."""
    if isinstance(given, (bytes, bytearray, memoryview)):
        return in_memory(f"the {kind} content of {len(given)} bytes", bytes(given))
    if not isinstance(given, (str, os.PathLike)):
        made = next((text for text in ("emit().buffer", "buffer") if hasattr(given, text.partition("(")[0])), None)
        hint = f" Pass its .{made}." if made else ""
        raise InputError(f"{who}: got a {type(given).__name__}, expected {expected}.{hint}")
    path = os.fsdecode(given)
    location, name = Path(path), repr(path)
    if not location.exists():
        raise InputError(f"{name} cannot be loaded: there is no such file.")
    if not location.is_file():
        found = "a directory" if location.is_dir() else "not a regular file"
        raise InputError(f"{name} cannot be loaded: it is {found}.")
    try:
        with location.open("rb") as file:
            held = os.fstat(file.fileno())
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if held.st_size else b"")
    except (OSError, ValueError) as error:
        raise InputError(f"{name} cannot be loaded: {error}.") from error
    return MappedFile(name, path, content, _identity(held))


def in_memory(name: str, content: bytes) -> MappedFile:
    """Return content that does not come from a file on the disk; messages call it by the name."""
    return MappedFile(name, content, memoryview(content), None)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


One: TypeAlias = "str | os.PathLike[str] | bytes"
Given: TypeAlias = "One | Sequence[One] | None"
"""What `load` takes as data files."""


@dataclass(frozen=True, slots=True, eq=False)
class DataFile:
    """A data file."""

    file: MappedFile
    weights: Mapping[str, Weight]  # its data, by name; not copied


class DataFiles:
    """The data files of a program, which stay as they are while the program is in use."""

    def __init__(self, files: Sequence[DataFile]) -> None:
        """Take files; raise an InputError when two have different data of the same name."""
        self.files = tuple(files)
        self.named: dict[str, Weight] = {}  # their data, by name
        owner: dict[str, DataFile] = {}
        for file in self.files:
            for name, weight in file.weights.items():
                known = self.named.setdefault(name, weight)
                if known is not weight and known.content != weight.content:
                    raise InputError(
                        f"load: data: {owner[name].file.name} and {file.file.name} both have {name!r}, with different "
                        "content. Give the data files of one program only."
                    )
                owner.setdefault(name, file)

    @property
    def weights(self) -> list[str]:
        """The names of the weights that they have, sorted."""
        return sorted(name for name in self.named if not name.startswith(DATA_KEY))

    def __bool__(self) -> bool:
        return bool(self.files)

    def __str__(self) -> str:
        return " and ".join(one.file.name for one in self.files)

    def path(self) -> str | None:
        """Return the path of one file with all data, merged when first needed, None for no data; or an InputError."""
        if len(self.files) == 1 and isinstance(source := self.files[0].file.source, str):
            return source
        return self._merged if self.files else None

    @cached_property
    def _merged(self) -> str:
        try:
            temporary = TemporaryFolder()
            weakref.finalize(self, temporary.remove)
            path = str(temporary.path / "data.ptd")
            with open(path, "wb") as file:
                if len(self.files) == 1:
                    file.write(self.files[0].file.content)
                else:
                    write_data(file, {name: (one.content, one.layout) for name, one in self.named.items()})
        except OSError as error:
            raise InputError(
                f"load: data: {self} cannot be put together in {tempfile.gettempdir()!r} for the runtime: {error}. "
                "Set TMPDIR to a directory with enough space, or emit one data file."
            ) from error
        return path

    def check(self) -> None:
        """Check that the files are still those that were read; raise an InputError when one was replaced or changed."""
        for one in self.files:
            one.file.check()


def read_data_files(given: Any, who: str = "load") -> DataFiles:
    """Read data files for `who`: a path, content, or a sequence of these, None for no file; else an InputError."""
    several = isinstance(given, (list, tuple))
    files = []
    for number, one in enumerate(() if given is None else given if several else (given,)):
        where = f"{who}: data[{number}]" if several else f"{who}: data"
        kind = "the path or content of a .ptd file" + ("" if several else ", or a list of these")
        mapped = open_file(one, where, kind, ".ptd")
        files.append(DataFile(mapped, mapped.parse(container.read_data, PTD)))
    return DataFiles(files)
