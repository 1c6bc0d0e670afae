"""ExecuTorch's emitter: what it emits from each node, and the pieces of the files that it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from executorch.exir import ExecutorchProgramManager
from executorch.exir._serialize.data_serializer import DataEntry, DataPayload  # describes a data file to a serializer
from executorch.exir.emit import _emitter as et_emitter  # records what it emits only for the top graphs of methods
from torch.export.graph_signature import InputKind

from exir_lowering._upstream.delegates import LoweredBackendModule
from exir_lowering._upstream.locks import during, replacing
from exir_lowering._upstream.loops import emitting_loops


def named_data_alignments(manager: ExecutorchProgramManager) -> dict[str, int]:
    """Return what alignment the delegates ask for, by the key of the named data in the `.pte` file."""
    output = manager._named_data
    return {key: entry.alignment for key, entry in output.pte_data.items()} if output is not None else {}


DataAddition = Callable[[Sequence[Any]], tuple[str, bytes]]
"""Takes the contents of a data file's segments in order; returns the key and content of a last one to add."""

_data_addition: ContextVar[DataAddition | None] = ContextVar("exir_lowering_data_addition", default=None)


def adding_to_data_files(addition: DataAddition) -> AbstractContextManager[DataAddition]:
    """Add a named datum to each data file that this thread emits: only the emitter knows which files there are."""
    return during(_data_addition, addition, _ADDING)


def _adding() -> list[tuple[Any, str, Any]]:
    from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

    serialize = FlatTensorSerializer.serialize

    def serialized(self: Any, data: DataPayload) -> Any:
        addition = _data_addition.get()
        if addition is not None:
            used = dict.fromkeys(entry.buffer_index for entry in data.named_data.values())
            key, content = addition([data.buffers[index] for index in used])
            entry = DataEntry(buffer_index=len(data.buffers), alignment=1, tensor_layout=None)
            data = DataPayload([*data.buffers, content], {**data.named_data, key: entry})
        return serialize(self, data)

    return [(FlatTensorSerializer, "serialize", serialized)]


_ADDING = replacing(_adding)


def write_buffer(buffer: Any, file: Any) -> None:
    """Write a segment's content to a file; ExecuTorch has bytes, and buffers on disk."""
    if isinstance(buffer, bytes):
        file.write(buffer)
    else:
        buffer.write_to_file(file)


@dataclass(frozen=True, slots=True)
class EmittedCall:
    """An instruction that calls a kernel or a delegate."""

    instruction: int  # its number in the method
    handle: Any  # the debug handle that its node had
    module: LoweredBackendModule | None  # of the delegate, None for a kernel
    delegate: int  # its number in the method's execution plan, -1 for a kernel
    results: int  # how many of its last arguments a delegate writes to


@dataclass(frozen=True, slots=True)
class GivenValue:
    """A value that a method is given before its first instruction."""

    number: int  # its number in the method
    name: str  # of an input that of its node; of a weight or state what the model calls it
    is_input: bool


@dataclass(slots=True)
class Emissions:
    """What is emitted, by method: the calls and the given values."""

    methods: dict[str, list[EmittedCall]]
    values: dict[str, list[GivenValue]]
    names: dict[str, str]  # what the model calls the weights and the state of the last method, by node


_emissions: ContextVar[Emissions | None] = ContextVar("exir_lowering_emissions", default=None)


def emitting() -> AbstractContextManager[Emissions]:
    """List, by method, what is emitted, with the calls in nested graphs, which the emitter's own tables lack."""
    return during(_emissions, Emissions({}, {}, {}), _EMITTING)


def _emitting() -> list[tuple[Any, str, Any]]:
    start, add = et_emitter._TopLevelEmitter.__init__, et_emitter._Emitter._add_debug_handle
    give = et_emitter._TopLevelEmitter.placeholder

    def started(self: Any, name: str, *args: Any, **kwargs: Any) -> None:
        start(self, name, *args, **kwargs)
        emissions = _emissions.get()
        if emissions is not None:
            self.given_mutable_buffer_warning = True  # that initial values are dropped: they are not, see the step
            emissions.methods[name], emissions.values[name] = [], []
            specs = self.exported_program.graph_signature.input_specs
            lifted = (spec for spec in specs if spec.kind is not InputKind.USER_INPUT)
            emissions.names = {spec.arg.name: str(spec.target) for spec in lifted}

    def added(self: Any, emitter_id: int, target: Any, lowered_module: Any = None) -> None:
        emissions, handle = _emissions.get(), self.node.meta.get("debug_handle")
        add(self, emitter_id, target, lowered_module)
        if emissions is not None:
            value = self.node.meta.get("val")
            delegate = -1 if lowered_module is None else len(self.emitter_state.delegates) - 1
            results = len(value) if isinstance(value, (list, tuple)) else 1
            instruction = self.instruction_start_offset + emitter_id
            # Methods are emitted one after the other; the emitters of nested graphs are those of the last one.
            calls = list(emissions.methods.values())[-1]
            calls.append(EmittedCall(instruction, handle, lowered_module, delegate, results))

    def given(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        emissions, value = _emissions.get(), give(self, target, args, kwargs)
        if emissions is not None:
            name = emissions.names.get(target, target)
            emissions.values[self.name].append(GivenValue(value.id, name, target not in emissions.names))
        return value

    return [
        (et_emitter._TopLevelEmitter, "__init__", started),
        (et_emitter._TopLevelEmitter, "placeholder", given),
        (et_emitter._Emitter, "_add_debug_handle", added),
        *emitting_loops(),
    ]


_EMITTING = replacing(_emitting)


def pte_contents(manager: ExecutorchProgramManager) -> Any:
    """Return the pieces of the `.pte` file; the public `buffer` keeps a joined copy in memory."""
    return manager._pte_data


def cord_pieces(cord: Any) -> list[Any]:
    """Return the pieces of a file: bytes, and what is on the disk; the first one is the tables."""
    return list(cord._buffers)


def set_cord_pieces(cord: Any, pieces: Sequence[Any]) -> None:
    """Replace all pieces of a file."""
    cord._buffers, cord._byte_size = list(pieces), sum(map(len, pieces))


def data_file_contents(manager: ExecutorchProgramManager) -> dict[str, Any]:
    """Return the pieces of each data file by name; ExecuTorch only writes all of them to a folder."""
    return dict(manager._tensor_data or {})
