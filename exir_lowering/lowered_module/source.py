"""The `.pte` file behind a lowered module, and how it is saved with the files beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path

from exir_lowering.errors import InputError
from exir_lowering.pte import assembling, digests, saving
from exir_lowering.pte.debug_info import SUFFIX, VERSION, DebugInfo, MethodDebug
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.saving import TemporaryFolder
from exir_lowering.runtime.source import ProgramFile


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A `.pte` file that was read, with its data files by their paths."""

    file: ProgramFile
    # what the debug handles of its methods stand for; empty when that is unknown
    debug: Callable[[], Mapping[str, MethodDebug]]
    folder: TemporaryFolder | None = None  # has the data files of a program that is in memory

    def save(self, target: Path, record: list[bytes | memoryview]) -> None:
        """Write the file with what a module keeps, and those beside it: all, or none and an OSError or InputError."""
        try:
            pieces = assembling.with_module(self.file.file.content, record)
        except CorruptError as error:
            raise InputError(f"{self.file.name} was changed by another tool: {error}. Make it again.") from None
        methods, beside = self.debug(), target.with_suffix(SUFFIX)
        files: dict[Path, saving.Write] = {target: lambda file: file.writelines(pieces)}
        for path in (Path(str(one.file.source)) for one in self.file.data.files):
            copy = target.parent / path.name
            if not (copy.exists() and os.path.samefile(copy, path)):
                files[copy] = saving.copy_of(path)
        if methods:
            debug = DebugInfo(VERSION, digests.identity(pieces[-1]), methods).to_json().encode()
            files[beside] = methodcaller("write", debug)
        saving.replace_files(files, target)
        if not methods:  # an existing one belongs to an earlier file
            beside.unlink(missing_ok=True)
