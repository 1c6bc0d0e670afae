"""The `.ptd` data files of a program: read, checked, and put together for the runtime, which takes one."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from exir_lowering.errors import InputError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.pte import container, digests, kinds, mapping
from exir_lowering.pte.container import Weight
from exir_lowering.pte.mapping import MappedFile
from exir_lowering.pte.program_writer import write_data
from exir_lowering.pte.saving import TemporaryFolder

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
        return sorted(name for name in self.named if not name.startswith(digests.DATA_KEY))

    def __bool__(self) -> bool:
        return bool(self.files)

    def __str__(self) -> str:
        return " and ".join(one.file.name for one in self.files)

    def path(self) -> str | None:
        """Return the path of one file with all data, merged when first needed, None for no data; or an InputError."""
        if not self.files:
            return None
        (first, *more) = self.files
        if not more and isinstance(first.file.source, str):
            return first.file.source
        return self._merged

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
                    write_data(file, self.named)
        except OSError as error:
            let_through(error)
            raise InputError(
                f"load: data: {self} cannot be put together in {tempfile.gettempdir()!r} for the runtime: {error}. "
                "Set TMPDIR to a directory with enough space, or emit one data file."
            ) from error
        return path

    def content(self) -> dict[str, memoryview]:
        """Return the data, by name, so that writing to it changes nothing on the disk; an InputError when replaced."""
        files = [container.read_data(one.file.writable()) for one in self.files]
        return {name: weight.content for file in files for name, weight in file.items()}

    def check(self, what: str = "program") -> None:
        """Check that the files are still those that were read; raise an InputError when one was replaced or changed."""
        for one in self.files:
            one.file.check(what)


def read(given: Any, who: str = "load") -> DataFiles:
    """Read data files for `who`: a path, content, or a sequence of these, None for no file; else an InputError."""
    several = isinstance(given, (list, tuple))
    files = []
    for number, one in enumerate(() if given is None else given if several else (given,)):
        where = f"{who}: data[{number}]" if several else f"{who}: data"
        kind = "the path or content of a .ptd file" + ("" if several else ", or a list of these")
        mapped = mapping.open_file(one, where, kind, ".ptd")
        files.append(DataFile(mapped, mapped.parse(container.read_data, kinds.PTD)))
    return DataFiles(files)
