"""Where a program comes from: a `.pte` file or its content, and a `.ptd` data file, read and checked."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from exir_lowering import kinds
from exir_lowering.errors import InputError
from exir_lowering.interrupts import let_through
from exir_lowering.kinds import Kind
from exir_lowering.runtime import format as file_format
from exir_lowering.runtime.debugging import DebugFile
from exir_lowering.runtime.flatbuffer import CorruptError

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class ProgramFile:
    """A `.pte` file that was checked.

    Attributes:
        name: How to call it in messages.
        source: Its path, or its content.
        data: The path of its data file.
        methods: What it says of its methods, by name.
        debug: Its debug information.
    """

    name: str
    source: str | bytes
    data: str | None
    methods: Mapping[str, file_format.Method]
    debug: DebugFile

    def where(self, method: str) -> str:
        """Say which method is meant, to begin a message with."""
        return f"Method {method!r} of {self.name}"

    def content(self) -> memoryview:
        """Return the content of the file, which is mapped, not read; writing to it changes nothing on the disk.

        Raises:
            InputError: It cannot be read any more.
        """
        if isinstance(self.source, bytes):
            return memoryview(bytearray(self.source))
        return _mapped(self.name, Path(self.source), mmap.ACCESS_COPY)

    def data_content(self) -> Mapping[str, memoryview]:
        """Return what the data file has, by name; it is mapped, not read.

        Raises:
            InputError: It cannot be read any more.
        """
        if self.data is None:
            return {}
        name = repr(self.data)
        return _parse(name, _mapped(name, Path(self.data), mmap.ACCESS_COPY), file_format.read_data)

    @property
    def backends(self) -> Mapping[str, str]:
        """The backends that it needs, each with the first method that does."""
        found: dict[str, str] = {}
        for method in self.methods.values():
            for backend in method.backends:
                found.setdefault(backend, method.name)
        return found

    @property
    def shares_state(self) -> bool:
        """Whether methods were planned to share their buffers: each has the same memory 2 for them, and no memory 3.

        In all other files each method has memory of its own.
        """
        arenas = [method.arenas for method in self.methods.values()]
        return len(arenas) > 1 and all(len(sizes) == 3 and sizes[2] == arenas[0][2] > 0 for sizes in arenas)


def read_source(source: object) -> tuple[str, str | bytes, Mapping[str, file_format.Method]]:
    """Return how to call a source in messages, its path or content, and its methods.

    Args:
        source: What the caller gave.

    Raises:
        InputError: It is neither a path nor content, cannot be read, or is damaged.
    """
    name, opened = _source(source)
    if isinstance(opened, str):
        return name, opened, _read(name, Path(opened), file_format.read_program)
    return name, opened, _parse(name, memoryview(opened), file_format.read_program)


def _source(source: object) -> tuple[str, str | bytes]:
    """Return how to call a source in messages, and its path or content."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        content = bytes(source)
        return f"the .pte content of {len(content)} bytes", content
    path = _path(source, "load", "the path or the content of a .pte file")
    return repr(path), path


def _path(given: object, who: str, expected: str) -> str:
    if isinstance(given, (str, os.PathLike)):
        return os.fsdecode(given)
    raise InputError(f"{who}: got a {type(given).__name__}, expected {expected}.")


def _read(name: str, path: Path, parse: Callable[[memoryview], Result], expected: Kind = kinds.PTE) -> Result:
    """Parse a file in place: it is mapped, and only its tables are read."""
    if not path.exists():
        raise InputError(f"{name} cannot be loaded: there is no such file.")
    if not path.is_file():
        kind = "a directory" if path.is_dir() else "not a regular file"
        raise InputError(f"{name} cannot be loaded: it is {kind}.")
    return _parse(name, _mapped(name, path), parse, expected)


def _mapped(name: str, path: Path, access: int = mmap.ACCESS_READ) -> memoryview:
    try:
        with path.open("rb") as file:
            empty = os.fstat(file.fileno()).st_size == 0
            return memoryview(b"" if empty else mmap.mmap(file.fileno(), 0, access=access))
    except (OSError, ValueError) as error:
        let_through(error)
        raise InputError(f"{name} cannot be loaded: {error}.") from error


def _parse(name: str, content: memoryview, parse: Callable[[memoryview], Result], expected: Kind = kinds.PTE) -> Result:
    if not content:
        raise InputError(f"{name} cannot be loaded: it is empty.")
    try:
        return parse(content)
    except CorruptError as error:
        # Without the cause, whose frames would keep the file mapped.
        message = str(error)
    kind = kinds.kind_of_content(content)
    if kind is not None and kind is not expected:
        advice = kind.advice if expected is kinds.PTE else "Give the one that was saved with the program."
        raise InputError(f"{name} cannot be loaded: it is {kind.name}, expected {expected.short}. {advice}")
    raise InputError(
        f"{name} cannot be loaded: it is damaged, or not what ExecuTorch writes: {message}. Make or copy it again."
    )


def check_data(name: str, source: str | bytes, data: object, methods: Mapping[str, file_format.Method]) -> str | None:
    """Check that the data file has the weights that the program asks for; return its path.

    Args:
        name: How to call the program's file in messages.
        source: Its path or content.
        data: What the caller gave as the data file.
        methods: The methods of the program.

    Raises:
        InputError: It is needed and was not given, cannot be read, or lacks weights.
    """
    needed = {weight: method.name for method in methods.values() for weight in method.external}
    if data is None:
        if not needed:
            return None
        beside = sorted(file.name for file in Path(source).parent.glob("*.ptd")) if isinstance(source, str) else []
        found = f" Beside it are: {', '.join(beside)}." if beside else ""
        raise InputError(
            f"{name} cannot be loaded: it lacks {len(needed)} of its weights ({_some(sorted(needed))}), which are in a "
            f".ptd data file. Pass its path as data=; saving an artifact writes it beside the .pte file.{found}"
        )
    path = _path(data, "load: data", "the path of a .ptd file")
    names = _read(repr(path), Path(path), lambda content: frozenset(file_format.read_data(content)), kinds.PTD)
    missing = sorted(set(needed) - names)
    if missing:
        raise InputError(
            f"{name} cannot be loaded: the data file {path!r} lacks {len(missing)} of the {len(needed)} weights that "
            f"are to be in it ({_some(missing)}); it has {_some(sorted(names)) or 'none'}. Pass the data file that was "
            "saved with this program."
        )
    return path


def _some(names: Any) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
