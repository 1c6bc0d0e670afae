"""Find the delegates that a file needs on this machine, or execute its original graphs where one is missing."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from exir_lowering.errors import BackendUnavailableError, BackendUnavailableWarning, LoweringError
from exir_lowering.plugins import availability, registry
from exir_lowering.plugins.availability import Missing
from exir_lowering.plugins.delegate import Delegate, DelegateContext
from exir_lowering.plugins.payload import find_checks
from exir_lowering.pte import format as file_format, header, mapping, payloads
from exir_lowering.runtime.source import ProgramFile

if TYPE_CHECKING:
    from executorch.exir.backend.compile_spec_schema import CompileSpec

Unavailable: TypeAlias = Literal["error", "fallback"]

_FALLBACK = (
    'A file that was emitted with keep_originals=True can be loaded with unavailable="fallback": PyTorch executes the '
    "original graphs then."
)


def find_delegates(
    file: ProgramFile, given: Mapping[str, Any], unavailable: Unavailable
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
        if unavailable == "error":
            raise BackendUnavailableError(f"{needs} {missing[backend].reason}. {missing[backend].advice} {_FALLBACK}")
        reason = missing.pop(backend).reason
        found[backend] = OriginalGraphs(backend, reason)
        warnings.warn(
            f"{file.name}: the partitions for the backend {backend!r} are executed by PyTorch, from their original "
            f"graphs, as {reason}.",
            BackendUnavailableWarning,
            stacklevel=5,
        )
    return found, missing


def rename_backends(file: ProgramFile, ids: Collection[str]) -> tuple[ProgramFile, dict[str, str]]:
    """Give backends that the runtime has other ids, in a copy of the file; return it, and the new ids by old ones."""
    content = bytearray(file.content())
    names = {old: f"{old[:-1]}{'~' if old[-1] != '~' else '_'}" for old in ids}
    end = header.read_pte(memoryview(content)).tables
    for old, new in names.items():
        # A str in a flatbuffer: its length, its bytes, a zero. Segments with weights and payloads are not searched.
        wanted, found = struct.pack("<I", len(old.encode())) + old.encode() + b"\0", -1
        while (found := content.find(wanted, found + 1, end)) >= 0:
            content[found + 4 : found + 4 + len(new.encode())] = new.encode()
    made = bytes(content)
    methods = file_format.read_program(memoryview(made), find_checks)
    return replace(file, file=mapping.in_memory(file.name, made), methods=methods), names


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
