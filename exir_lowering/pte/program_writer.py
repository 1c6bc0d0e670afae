"""Write files without ExecuTorch's compiler: a program that only calls one payload, and data files put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import flatbuffers
from flatbuffers import number_types

from exir_lowering.pte import container, slots
from exir_lowering.pte.container import Weight
from exir_lowering.pte.value_kinds import CODES, TENSOR, MemoryLayout, Tensor

_ALIGNMENT = 128  # of a segment of a program, as ExecuTorch has it
_DATA_ALIGNMENT = 4096  # of a segment of a data file; what its backend asked for is smaller, and not in the file

_REFERENCE = number_types.UOffsetTFlags
_INT8, _UINT8, _INT32 = number_types.Int8Flags, number_types.Uint8Flags, number_types.Int32Flags
_UINT32, _INT64, _UINT64 = number_types.Uint32Flags, number_types.Int64Flags, number_types.Uint64Flags

_Table = dict[int, Any]
"""The fields of a table, by their slots: a text, bytes, a table, a list of tables; a pair of a kind and numbers for a
vector, and of a kind and a number for a number. None, and a number that is 0, are left out."""


@dataclass(frozen=True, slots=True)
class PayloadCall:
    """A method that does nothing but call a payload."""

    method: str
    backend: str
    payload: memoryview
    specs: Sequence[tuple[str, bytes]]  # the compile specs: keys and values
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


def write_call(call: PayloadCall, named: Mapping[str, memoryview]) -> bytes:
    """Return a `.pte` file with one method and named data; names of the same object share one segment."""
    of = slots.Program
    shared = {id(content): content for content in named.values()}
    numbers = {key: number for number, key in enumerate(shared, 2)}
    segments = [memoryview(b""), call.payload, *shared.values()]  # the first one is where constants would be
    areas, pieces, end = _lay_out(segments, _ALIGNMENT)
    tables: _Table = {
        of.EXECUTION_PLAN: [_plan(call)],
        of.CONSTANT_BUFFER: [],
        of.BACKEND_DELEGATE_DATA: [],
        of.SEGMENTS: areas,
        of.CONSTANT_SEGMENT: {slots.SubsegmentOffsets.OFFSETS: (_UINT64, [0])},  # of constant 0, which is none
        of.NAMED_DATA: [
            {slots.NamedData.KEY: name, slots.NamedData.SEGMENT_INDEX: (_UINT32, numbers[id(content)])}
            for name, content in named.items()
        ],
    }
    return b"".join([container.add_pte_header(_build(tables, container.PTE_MAGIC), _ALIGNMENT, end), *pieces])


def write_data(file: BinaryIO, data: Mapping[str, Weight]) -> None:
    """Write a `.ptd` file with named data, which are not copied."""
    areas, pieces, end = _lay_out([one.content for one in data.values()], _DATA_ALIGNMENT)
    named = [
        {
            slots.FlatNamedData.KEY: name,
            slots.FlatNamedData.SEGMENT_INDEX: (_UINT32, number),
            slots.FlatNamedData.TENSOR_LAYOUT: None if one.layout is None else _layout(one.layout, slots.TensorLayout),
        }
        for number, (name, one) in enumerate(data.items())
    ]
    tables = _build({slots.FlatTensor.SEGMENTS: areas, slots.FlatTensor.NAMED_DATA: named}, container.PTD_MAGIC)
    file.write(container.add_ptd_header(tables, _DATA_ALIGNMENT, end + -end % _DATA_ALIGNMENT))
    file.writelines([*pieces, bytes(-end % _DATA_ALIGNMENT)])


def _lay_out(segments: Iterable[memoryview], alignment: int) -> tuple[list[_Table], list[bytes | memoryview], int]:
    """Return tables that say where segments are, what they are made of, and where they end."""
    tables: list[_Table] = []
    pieces: list[bytes | memoryview] = []
    end = 0
    for segment in segments:
        pieces += [bytes(-end % alignment), segment]
        end += -end % alignment
        area = slots.DataSegment
        tables.append({area.OFFSET: (_UINT64, end), area.SIZE: (_UINT64, segment.nbytes)})
        end += segment.nbytes
    return tables, pieces, end


def _plan(call: PayloadCall) -> _Table:
    of, chain, meta = slots.ExecutionPlan, slots.Chain, slots.ContainerMetadata
    values = [
        {slots.EValue.VAL_TYPE: (_UINT8, TENSOR), slots.EValue.VAL: _tensor(tensor)}
        for tensor in (*call.inputs, *call.outputs)
    ]
    taken = len(call.inputs)
    inputs, outputs = (_INT32, range(taken)), (_INT32, range(taken, len(values)))
    instruction = {
        slots.Instruction.INSTR_ARGS_TYPE: (_UINT8, slots.InstructionArguments.DELEGATE_CALL),
        slots.Instruction.INSTR_ARGS: {slots.DelegateCall.ARGS: (_INT32, range(len(values)))},  # of delegate 0
    }
    return {
        of.NAME: call.method,
        of.CONTAINER_META_TYPE: {meta.ENCODED_INP_STR: "", meta.ENCODED_OUT_STR: ""},
        of.VALUES: values,
        of.INPUTS: inputs,
        of.OUTPUTS: outputs,
        of.CHAINS: [{chain.INPUTS: inputs, chain.OUTPUTS: outputs, chain.INSTRUCTIONS: [instruction]}],
        of.OPERATORS: [],
        of.DELEGATES: [_delegate(call)],
        of.NON_CONST_BUFFER_SIZES: (_INT64, [0]),
    }


def _delegate(call: PayloadCall) -> _Table:
    of, place = slots.BackendDelegate, slots.BackendDelegateDataReference
    return {
        of.ID: call.backend,
        of.PROCESSED: {place.LOCATION: (_INT8, slots.DataLocation.SEGMENT), place.INDEX: (_UINT32, 1)},
        of.COMPILE_SPECS: [{slots.CompileSpec.KEY: key, slots.CompileSpec.VALUE: value} for key, value in call.specs],
    }


def _tensor(tensor: Tensor) -> _Table:
    dynamism = slots.TensorShapeDynamism
    dynamic = dynamism.DYNAMIC_BOUND if tensor.dynamic else dynamism.STATIC
    return {**_layout(tensor, slots.Tensor), slots.Tensor.SHAPE_DYNAMISM: (_INT8, dynamic)}


def _layout(tensor: MemoryLayout, of: type[slots.Tensor] | type[slots.TensorLayout]) -> _Table:
    return {
        of.SCALAR_TYPE: (_INT8, CODES[tensor.dtype]),
        of.SIZES: (_INT32, tensor.sizes),
        of.DIM_ORDER: bytes(tensor.dim_order),
    }


def _build(root: _Table, identifier: bytes) -> bytes:
    """Return a flatbuffer; the identifier is the four bytes that tell its format."""
    builder = flatbuffers.Builder(1024)
    builder.Finish(_add_table(builder, root), file_identifier=identifier)
    return bytes(builder.Output())


def _add_table(builder: Any, fields: _Table) -> int:
    # What a table refers to is added before it.
    added = {slot: _field(builder, value) for slot, value in fields.items() if value is not None}
    builder.StartObject(max(added, default=-1) + 1)
    for slot, (kind, number) in added.items():
        if number:
            builder.PrependUOffsetTRelative(number) if kind is _REFERENCE else builder.Prepend(kind, number)
            builder.Slot(slot)
    return int(builder.EndObject())


def _field(builder: Any, value: Any) -> tuple[Any, int]:
    """Return the kind of a field, and its number, or where what it refers to was added."""
    if isinstance(value, str):
        return _REFERENCE, builder.CreateString(value)
    if isinstance(value, bytes):
        return _REFERENCE, builder.CreateByteVector(value)
    if isinstance(value, dict):
        return _REFERENCE, _add_table(builder, value)
    if isinstance(value, tuple) and isinstance(value[1], int):
        return value
    kind, items = (_REFERENCE, [_add_table(builder, one) for one in value]) if isinstance(value, list) else value
    builder.StartVector(kind.bytewidth, len(items), kind.bytewidth)
    for item in reversed(items):
        builder.PrependUOffsetTRelative(item) if kind is _REFERENCE else builder.Prepend(kind, item)
    return _REFERENCE, builder.EndVector()
