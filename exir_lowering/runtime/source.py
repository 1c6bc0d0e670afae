"""Where a program comes from: a `.pte` file or its content, and its `.ptd` data files, read and checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exir_lowering._upstream.runtime import open_program
from exir_lowering.errors import InputError
from exir_lowering.errors.wording import few
from exir_lowering.plugins.payload import find_checks
from exir_lowering.pte import format as file_format, kinds, mapping, signatures
from exir_lowering.pte.data_files import DataFiles
from exir_lowering.pte.manifest import Bucket, Line, read as read_manifest, split
from exir_lowering.pte.mapping import MappedFile
from exir_lowering.pte.value_kinds import MemoryLayout
from exir_lowering.runtime.debugging import DebugFile


@dataclass(frozen=True, slots=True, eq=False)
class ProgramFile:
    """A `.pte` file that was checked."""

    file: MappedFile
    data: DataFiles
    methods: Mapping[str, file_format.MethodSpec]  # what it says about them, by name
    debug: DebugFile
    manifest: tuple[Line, ...] = ()  # the methods of families

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.file.name

    def where(self, method: str) -> str:
        """Say which method is meant, to begin a message with."""
        return f"Method {method!r} of {self.name}"

    def content(self) -> memoryview:
        """Return the content of the file, which is mapped, not read; writing to it changes nothing on the disk."""
        return self.file.writable()

    def open(self, *, profiled: bool = False) -> Any:
        """Open the file and its data in ExecuTorch's runtime, which may raise a RuntimeError; see `open_program`."""
        program = open_program(self.file.source, self.data.path(), profiled=profiled)
        # The runtime opens paths. What it has open is what was checked if it is there still.
        self.file.check()
        self.data.check()
        return program

    @property
    def backends(self) -> Mapping[str, str]:
        """The backends that it needs, each with the first method that does."""
        found: dict[str, str] = {}
        for method in self.methods.values():
            for backend in method.backends:
                found.setdefault(backend, method.name)
        return found

    def families(self) -> dict[str, list[Line]]:
        """Return the lines of each family in order of preference, without those of methods that were left out."""
        found: dict[str, list[Line]] = {}
        for line in self.manifest:
            if line.method in self.methods:
                found.setdefault(split(line.method)[0], []).append(line)
        return found

    def bucket(self, method: str) -> Bucket:
        """Return the sizes that a method was specialised for."""
        return next((line.bucket for line in self.manifest if line.method == method), Bucket())

    def needed(self, missing: Collection[str]) -> list[str]:
        """Return those of the missing backends without which a method, or all of a family, cannot run."""
        runs = {name for name, method in self.methods.items() if not set(method.backends).intersection(missing)}
        served = [lines for lines in self.families().values() if not runs.isdisjoint(line.method for line in lines)]
        spared = {line.method for lines in served for line in lines}
        wanted = {backend for name, one in self.methods.items() if name not in spared for backend in one.backends}
        return [backend for backend in missing if backend in wanted]

    @property
    def sharing(self) -> frozenset[str]:
        """The methods that were planned to share their state; see `pte.signatures`."""
        return signatures.sharing({name: method.arenas for name, method in self.methods.items()})


def read_source(source: object) -> tuple[MappedFile, Mapping[str, file_format.MethodSpec], tuple[Line, ...]]:
    """Return a `.pte` file, what it says about its methods, and their families, once it was checked."""
    file = mapping.open_file(source, "load", "the path or the content of a .pte file", ".pte")
    methods = file.parse(lambda content: file_format.read_program(content, find_checks), kinds.PTE)
    return file, methods, file.parse(lambda _: read_manifest(methods), kinds.PTE)


def needed_weights(methods: Mapping[str, file_format.MethodSpec]) -> frozenset[str]:
    """Return the names of the weights that are to be in data files."""
    return frozenset(weight for method in methods.values() for weight in method.external)


def check_weights(file: MappedFile, data: DataFiles, methods: Mapping[str, file_format.MethodSpec]) -> None:
    """Check that the data files have the weights that a program asks for; raise an InputError when they lack one."""
    needed = needed_weights(methods)
    missing = sorted(needed - data.named.keys())
    if not missing:
        _check_tensors(file, data, methods)
        return
    if not data:
        path = file.source
        beside = sorted(one.name for one in Path(path).parent.glob("*.ptd")) if isinstance(path, str) else []
        found = f" Beside it are: {', '.join(beside)}." if beside else ""
        raise InputError(
            f"{file.name} cannot be loaded: it lacks {len(needed)} of its weights ({few(missing, 3)}), which are in a "
            f".ptd data file. Pass its path as data=; saving an artifact writes it beside the .pte file.{found}"
        )
    several = len(data.files) > 1
    raise InputError(
        f"{file.name} cannot be loaded: the data file{'s' if several else ''} {data} {'lack' if several else 'lacks'} "
        f"{len(missing)} of the {len(needed)} weights that should be in {'them' if several else 'it'} "
        f"({few(missing, 3)}); {'they have' if several else 'it has'} "
        f"{few(data.weights, 3) or 'none'}. Pass all data files that were saved with this program."
    )


def _check_tensors(file: MappedFile, data: DataFiles, methods: Mapping[str, file_format.MethodSpec]) -> None:
    """Check that what the data files have is what a program takes it for: the runtime reads as much as it expects."""
    for method in methods.values():
        for weight, need in method.external.items():
            if not data.named[weight].fits(need):
                raise InputError(
                    f"{file.name} cannot be loaded: {data} has {data.named[weight]} as {weight!r}, but method "
                    f"{method.name!r} needs {need if isinstance(need, MemoryLayout) else f'{need} bytes'}. Pass the "
                    "data file that was saved with this program."
                )
