"""The `.pte` file behind a lowered module: how it is saved, with the files beside it, and executed by its delegates."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, Protocol

import torch

from exir_lowering._upstream import installed
from exir_lowering.errors import BackendContractError, BackendUnavailableError, InputError, InvariantError
from exir_lowering.lowered_module.convention import Convention
from exir_lowering.plugins import availability, registry
from exir_lowering.pte import assembling, digests, files, saving
from exir_lowering.pte.debug_info import SUFFIX, VERSION, DebugInfo, MethodDebug
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.saving import TemporaryFolder
from exir_lowering.pte.value_kinds import NULL, Tensor
from exir_lowering.runtime import LoadedProgram
from exir_lowering.runtime.inputs import describe, prepare, show
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
        self, delegates: Any, unavailable: Unavailable = "error", without: Collection[str] = ()
    ) -> LoadedProgram | None:
        """Open the file as `load` does, without some of its methods; None when no other is left."""
        methods = {name: method for name, method in self.methods.items() if name not in without}
        return open_file(replace(self.file, methods=methods), delegates, unavailable) if methods else None

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


class Runner(Protocol):
    """Executes methods; what a method writes into its buffers is kept for its next run."""

    def run(self, convention: Convention, leaves: Sequence[Any]) -> list[Any]:
        """Execute a method with the values in its arguments; return its outputs, flat."""
        ...

    def fresh(self) -> Runner:
        """Return another runner, whose methods are in their initial state."""
        ...

    def describe(self, name: str) -> str:
        """Describe what executes a method."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DelegateRunner:
    """Executes each delegate of a file through its `Delegate`, or the runtime's own backend."""

    _source: Source
    _loaded: LoadedProgram | None  # the file without the methods that are missing; None when it has no others
    missing: Mapping[str, str]  # the methods that cannot be executed here, and why
    _again: Callable[[], LoadedProgram | None]  # loads it again

    def run(self, convention: Convention, leaves: Sequence[Any]) -> list[Any]:
        """Execute a method; it raises what `LoweredMethod.__call__` does."""
        name = convention.method
        if name in self.missing or self._loaded is None:
            raise BackendUnavailableError(self.missing[name])
        method = self._source.methods[name]
        outputs = self._loaded.run(name, *file_inputs(convention, method, leaves))
        check_outputs(convention, method, outputs)
        return outputs

    def fresh(self) -> DelegateRunner:
        """Return another runner, with methods in their initial state; InputError if the file is not the one loaded."""
        self._source.check()
        return DelegateRunner(self._source, self._again(), self.missing, self._again)

    def describe(self, name: str) -> str:
        """Describe what executes a method."""
        by = ", ".join(self._source.methods[name].backends) or "ExecuTorch's kernels"
        return f"{by}, which cannot be executed here" if name in self.missing else by


def file_inputs(convention: Convention, method: MethodSpec, leaves: Sequence[Any]) -> list[Any]:
    """Return the values in a method's arguments as its file takes them (None for a str); InputError if it does not."""
    given = [
        None if fixed is not None and value.kind == NULL else leaf
        for leaf, fixed, value in zip(leaves, convention.inputs, method.inputs, strict=True)
    ]
    return prepare(f"{convention.method}()", method, given, convention.labels)


def check_outputs(convention: Convention, method: MethodSpec, outputs: Sequence[Any]) -> None:
    """Check the declared types of outputs: BackendContractError if the method has delegates, else InvariantError."""
    kind = BackendContractError if method.backends else InvariantError
    by = f"of {', '.join(method.backends)}" if method.backends else "of ExecuTorch's kernels"
    if len(outputs) != len(method.outputs):
        raise kind(f"{convention.method}() returned {len(outputs)} outputs {by}, expected {len(method.outputs)}.")
    for index, (value, output) in enumerate(zip(method.outputs, outputs, strict=True)):
        expected, is_tensor = value.content, isinstance(output, torch.Tensor)
        right = is_tensor == isinstance(expected, Tensor)
        if isinstance(expected, Tensor) and right:
            right = output.dtype == expected.dtype and expected.misfit(output.shape) is None
        if not right:
            raise kind(
                f"{convention.method}(): {convention.output_label(index)} is {show(output)} {by}, expected "
                f"{describe(value)}."
            )


def open_available(source: Source, delegates: Any) -> DelegateRunner:
    """Load the methods that can be executed here; what is returned says why the others cannot."""
    given = registry.check_delegates(delegates)
    reasons: dict[str, str] = {}
    for name, method in source.methods.items():
        for backend in method.backends:
            found = availability.executor(backend, given)
            if isinstance(found, availability.Missing):
                reasons[name] = f"Method {name!r} needs the backend {backend!r}, and {found.reason}. {found.advice}"

    load_others = partial(source.open, delegates, without=reasons)
    try:
        loaded = load_others()
    except BackendUnavailableError as error:
        # Python delegates cannot be used at all, or not so many of them.
        own = installed.own_backends()
        reasons.update({name: str(error) for name, m in source.methods.items() if not own.issuperset(m.backends)})
        loaded = load_others()
    return DelegateRunner(source, loaded, reasons, load_others)
