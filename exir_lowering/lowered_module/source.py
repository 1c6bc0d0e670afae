"""The `.pte` file behind a lowered module: where it comes from, and how it is saved, with the files beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from operator import methodcaller
from pathlib import Path
from typing import Any

from exir_lowering.errors import InputError
from exir_lowering.pte import assembling, digests, files, saving
from exir_lowering.pte.debug_info import SUFFIX, VERSION, DebugInfo, MethodDebug
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.saving import TemporaryFolder
from exir_lowering.runtime import LoadedProgram
from exir_lowering.runtime.program import open_file
from exir_lowering.runtime.source import ProgramFile, Unavailable


@dataclass(slots=True, eq=False)
class Source:
    """A `.pte` file that was read."""

    file: ProgramFile
    data: tuple[Path, ...]  # its data files
    # what the debug handles of its methods stand for; empty when that is unknown
    debug: Callable[[], Mapping[str, MethodDebug]]
    folder: TemporaryFolder | None = None  # has the data files of a program that is in memory

    @property
    def methods(self) -> Mapping[str, MethodSpec]:
        """What the file says about its methods, by name."""
        return self.file.methods

    def open(
        self, delegates: Any, engine: str, unavailable: Unavailable = "error", without: Collection[str] = ()
    ) -> LoadedProgram | None:
        """Open the file as `load` does, without some of its methods; None when no other is left."""
        methods = {name: method for name, method in self.methods.items() if name not in without}
        return open_file(replace(self.file, methods=methods), delegates, engine, unavailable) if methods else None

    def check(self) -> None:
        """Check that the files are still those that were read; InputError if one is gone, replaced or changed."""
        self.file.file.check("module")
        self.file.data.check("module")

    def save(
        self,
        target: Path,
        record: list[bytes | memoryview],  # what the module keeps in it, in pieces
        # returns ExecuTorch's bundled program for the path of the `.pte` file, or None
        bundle: Callable[[Path], bytes | None],
    ) -> None:
        """Write the file with a record, and those beside it: all of them, or none and an OSError or InputError."""
        mapped = self.file.file
        try:
            pieces = assembling.with_module(mapped.content, record)
        except CorruptError as error:
            raise InputError(f"{mapped.name} was changed by another tool: {error}. Make it again.") from None
        with saving.Staging() as staging:
            made = staging.add(target, lambda file: file.writelines(pieces))
            methods = self.debug()
            debug = DebugInfo(VERSION, digests.identity(pieces[-1]), methods).to_json().encode() if methods else None
            beside = {".bpte": bundle(made), SUFFIX: debug}
            for copy, path in ((target.parent / path.name, path) for path in self.data):
                if not _is_same(copy, path):
                    staging.add(copy, saving.copy_of(path))
            for suffix, content in beside.items():
                if content is not None:
                    staging.add(target.with_suffix(suffix), methodcaller("write", content))
            own = isinstance(mapped.source, str) and _is_same(target, Path(mapped.source))
            staging.publish(target)
        if own:  # it has the same methods
            self.file = replace(self.file, file=files.open_file(target, "save", "a path", ".pte"))
        for suffix, content in beside.items():
            if content is None:  # an existing one belongs to an earlier file
                target.with_suffix(suffix).unlink(missing_ok=True)


def data_paths(given: Any) -> list[str]:
    """Return the paths of a module's data files, which it saves copies of by name; InputError for anything else."""
    several = given if isinstance(given, (list, tuple)) else () if given is None else (given,)
    for one in several:
        if not isinstance(one, (str, os.PathLike)):
            raise InputError(
                f"LoweredModule.load: data: got a {type(one).__name__}, expected the path of a .ptd file, or a list of "
                "these."
            )
    paths = [os.fsdecode(one) for one in several]
    if len({os.path.basename(path) for path in paths}) < len(paths):
        raise InputError(
            f"LoweredModule.load: data: {', '.join(map(repr, paths))} have the same name in different directories; "
            "save would write them to one file. Rename one of them."
        )
    return paths


def debug_beside(path: Path, content: memoryview) -> Mapping[str, MethodDebug]:
    """Return what the debug information beside a file says about its methods, if it belongs to this file."""
    try:
        info = DebugInfo.from_json(path.with_suffix(SUFFIX).read_bytes())
    except (OSError, InputError):
        return {}
    return info.methods if info.digest == digests.identity(content) else {}


def _is_same(target: Path, path: Path) -> bool:
    return target.exists() and os.path.samefile(target, path)
