"""What a program is loaded from: its `.pte` file, data files and debug information, and the delegates that it needs."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from exir_lowering._upstream.runtime import open_program
from exir_lowering.errors import BackendUnavailableError, BackendUnavailableWarning, InputError, LoweringError, few
from exir_lowering.plugins import availability, registry
from exir_lowering.plugins.availability import Missing
from exir_lowering.plugins.delegate import Delegate, DelegateContext
from exir_lowering.pte import container, digests, files, format as file_format, payloads
from exir_lowering.pte.debug_info import DebugFile
from exir_lowering.pte.digests import Verify
from exir_lowering.pte.files import DataFiles, MappedFile
from exir_lowering.pte.manifest import Bucket, Line, read as read_manifest, split
from exir_lowering.pte.value_kinds import MemoryLayout

if TYPE_CHECKING:
    from executorch.exir.backend.compile_spec_schema import CompileSpec


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

    def open(self, *, profiled: bool = False) -> Any:
        """Open the file and its data in ExecuTorch's runtime, which may raise a RuntimeError; see `open_program`."""
        try:
            program = open_program(self.file.source, self.data.path(), profiled=profiled)
        except MemoryError as error:
            raise InputError(
                f"{self.name} cannot be loaded: it plans more memory than this process can have, or is damaged. Make "
                "or copy it again, or run it where there is more."
            ) from error
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
        """Return the lines of each family in order of preference."""
        found: dict[str, list[Line]] = {}
        for line in self.manifest:
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
        """The methods that were planned to share their state; see `pte.format`."""
        return file_format.sharing(self.methods)


def read_file(source: object, data: files.Given, verify: Verify) -> ProgramFile:
    """Read and check a file and its data files; the arguments and errors are those of `load`."""
    if not (isinstance(verify, bool) or (isinstance(verify, str) and verify == "full")):
        raise InputError(f'load: verify: got {verify!r}, expected True, False or "full".')
    file = files.open_file(source, "load", "the path or the content of a .pte file", ".pte")
    methods = file.parse(file_format.read_program, files.PTE)
    manifest = file.parse(lambda _: read_manifest(methods), files.PTE)
    seal = digests.check_program(file, verify)
    given = files.read_data_files(data)
    needed = frozenset(weight for method in methods.values() for weight in method.external)
    _check_weights(file, given, methods, needed)
    digests.check_all(file, seal, given, needed, verify)
    for one in (file, *(each.file for each in given.files)):  # the runtime maps it again: no page is to be there twice
        one.release()
    return ProgramFile(file, given, methods, DebugFile(file), manifest)


def _check_weights(
    file: MappedFile, data: DataFiles, methods: Mapping[str, file_format.MethodSpec], needed: frozenset[str]
) -> None:
    """Check that the data files have the weights that a program asks for, as it takes them; else an InputError."""
    missing = sorted(needed - data.named.keys())
    if missing and not data:
        path = file.source
        beside = sorted(one.name for one in Path(path).parent.glob("*.ptd")) if isinstance(path, str) else []
        found = f" Beside it are: {', '.join(beside)}." if beside else ""
        raise InputError(
            f"{file.name} cannot be loaded: it lacks {len(needed)} of its weights ({few(missing, 3)}), which are in a "
            f".ptd data file. Pass its path as data=; saving an artifact writes it beside the .pte file.{found}"
        )
    if missing:
        raise InputError(
            f"{file.name} cannot be loaded: {len(missing)} of its {len(needed)} weights are not in {data}: "
            f"{few(missing, 3)}. There is {few(data.weights, 3) or 'none'}. Pass all data files that were saved with "
            "this program."
        )
    for method in methods.values():
        for weight, need in method.external.items():
            if not data.named[weight].fits(need):  # the runtime reads as much as it expects
                raise InputError(
                    f"{file.name} cannot be loaded: {data} has {data.named[weight]} as {weight!r}, but method "
                    f"{method.name!r} needs {need if isinstance(need, MemoryLayout) else f'{need} bytes'}. Pass the "
                    "data file that was saved with this program."
                )


Unavailable: TypeAlias = Literal["error", "fallback"]

_FALLBACK = (
    'A file that was emitted with keep_originals=True can be loaded with unavailable="fallback": PyTorch executes the '
    "original graphs then."
)


def find_delegates(
    file: ProgramFile, given: Mapping[str, Any], unavailable: Unavailable | Literal["later"]
) -> tuple[dict[str, Delegate], dict[str, Missing]]:
    """Find a delegate for each backend that the runtime lacks, given ones first; and what is missing but not needed."""
    found: dict[str, Delegate] = {}
    missing: dict[str, Missing] = {}
    errors: dict[str, LoweringError] = {}
    for backend in file.backends:
        try:
            executor = availability.executor(backend, given)
        except LoweringError as error:
            errors[backend], executor = error, Missing(str(error).removesuffix("."), "Repair its plug-in.")
        if isinstance(executor, Missing):
            missing[backend] = executor
        elif executor is not None:
            found[backend] = executor
    for backend in file.needed(missing):
        needs = f"{file.name} cannot be loaded: method {file.backends[backend]!r} needs the backend {backend!r}, and"
        if backend in errors:
            raise type(errors[backend])(f"{needs} {errors[backend]}") from errors[backend].__cause__
        if unavailable == "later":
            continue
        if unavailable == "error":
            raise BackendUnavailableError(f"{needs} {missing[backend].reason}. {missing[backend].advice} {_FALLBACK}")
        reason = missing.pop(backend).reason
        found[backend] = OriginalGraphs(backend, reason)
        warnings.warn(
            f"{file.name}: the partitions for the backend {backend!r} are executed by PyTorch, from their original "
            f"graphs, as {reason}.",
            BackendUnavailableWarning,
            stacklevel=4,
        )
    return found, missing


def rename_backends(file: ProgramFile, ids: Collection[str]) -> tuple[ProgramFile, dict[str, str]]:
    """Give backends that the runtime has other ids, in a copy of the file; return it, and the new ids by old ones."""
    content = bytearray(file.file.content)
    names = {old: f"{old[:-1]}{'~' if old[-1] != '~' else '_'}" for old in ids}
    end = container.read_pte(memoryview(content)).tables
    for old, new in names.items():
        # A str in a flatbuffer: its length, its bytes, a zero. Segments with weights and payloads are not searched.
        wanted, found = struct.pack("<I", len(old.encode())) + old.encode() + b"\0", -1
        while (found := content.find(wanted, found + 1, end)) >= 0:
            content[found + 4 : found + 4 + len(new.encode())] = new.encode()
    made = bytes(content)
    methods = file_format.read_program(memoryview(made))
    return replace(file, file=files.in_memory(file.name, made), methods=methods), names


class OriginalGraphs(Delegate):
    """Stands in for a backend: ignores its payloads, and executes the graphs that the file keeps beside them."""

    def __init__(self, backend_id: str, reason: str) -> None:
        self.backend_id, self.reason = backend_id, reason  # why it is missing here, as a clause
        self._torch = registry.find_delegate(payloads.ORIGINALS)

    def compile(self, processed: bytes, compile_specs: list[CompileSpec], context: DelegateContext) -> Any:
        """Read the original graph of the partition; raise a BackendUnavailableError when the file does not keep it."""
        payload = context.named_data(payloads.original_key(context.method, context.number))
        if payload is None:
            raise BackendUnavailableError(
                f"method {context.method!r} needs the backend {self.backend_id!r}, and {self.reason}. There is no "
                "original graph to fall back to: the file has it if it was emitted with keep_originals=True, and its "
                "data file is given."
            )
        return self._torch.compile(payload, [], context)

    def execute(self, handle: Any, inputs: list[Any]) -> Sequence[Any]:
        """Execute the graph."""
        return self._torch.execute(handle, inputs)

    def destroy(self, handle: Any) -> None:
        """Release the graph."""
        self._torch.destroy(handle)
