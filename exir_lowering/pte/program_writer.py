"""Write a `.pte` file that does nothing but call one payload, without ExecuTorch's compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exir_lowering.pte import header, slots
from exir_lowering.pte.dtypes import CODES
from exir_lowering.pte.flatbuffer_writer import (
    INT8,
    INT32,
    INT64,
    REFERENCE,
    UINT8,
    UINT32,
    UINT64,
    FlatbufferWriter,
)
from exir_lowering.pte.value_kinds import NULL, Tensor, ValueSpec

_ALIGNMENT = 128  # of a segment, as ExecuTorch has it
_PLANNED_ALIGNMENT = 16  # of a tensor in planned memory
_ARENA = 1  # number 0 is no memory


@dataclass(frozen=True, slots=True)
class PayloadCall:
    """A method that does nothing but call a payload."""

    method: str
    backend: str
    payload: memoryview
    specs: Sequence[tuple[str, bytes]]  # what the partitioner told the backend: keys and values
    arguments: Sequence[ValueSpec]  # what the payload is called with: tensors and None
    inputs: Sequence[int]  # which of the arguments, all of them tensors, the method takes
    outputs: Sequence[int]  # which of them it returns; those that it takes too are in memory of its own


def write_call(call: PayloadCall, named: Mapping[str, memoryview]) -> bytes:
    """Return a `.pte` file with one method and named data; names of the same object share one segment."""
    nothing = memoryview(b"")  # where constants would be
    shared = {id(content): content for content in named.values()}
    segments = [nothing, call.payload, *shared.values()]
    numbers = {key: number for number, key in enumerate(shared, 2)}
    offsets, end = [], 0
    for segment in segments:
        offsets.append(_round_up(end, _ALIGNMENT))
        end = offsets[-1] + segment.nbytes
    places = [(offset, segment.nbytes) for offset, segment in zip(offsets, segments, strict=True)]
    tables = _Tables().write(call, places, {name: numbers[id(content)] for name, content in named.items()})
    pieces: list[bytes | memoryview] = [header.add_pte_header(tables, _ALIGNMENT, end)]
    end = 0
    for offset, segment in zip(offsets, segments, strict=True):
        pieces += [bytes(offset - end), segment]
        end = offset + segment.nbytes
    return b"".join(pieces)


def _round_up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


class _Tables:
    """The tables of a file with one method, under construction."""

    def __init__(self) -> None:
        self._writer = FlatbufferWriter()
        self._memory = 0

    def write(self, call: PayloadCall, segments: Sequence[tuple[int, int]], named: Mapping[str, int]) -> bytes:
        """Return the tables; segments are given by where they start and their sizes, names by their segments."""
        of, writer = slots.Program, self._writer
        offset, size = slots.DataSegment.OFFSET, slots.DataSegment.SIZE
        plan = self._add_plan(call)
        areas = [writer.add_table({offset: (UINT64, start), size: (UINT64, length)}) for start, length in segments]
        placeholder = writer.add_numbers(UINT64, [0])  # of constant 0, which is none
        program = writer.add_table(
            {
                of.EXECUTION_PLAN: (REFERENCE, writer.add_references([plan])),
                of.CONSTANT_BUFFER: (REFERENCE, writer.add_references([])),
                of.BACKEND_DELEGATE_DATA: (REFERENCE, writer.add_references([])),
                of.SEGMENTS: (REFERENCE, writer.add_references(areas)),
                of.CONSTANT_SEGMENT: (
                    REFERENCE,
                    writer.add_table({slots.SubsegmentOffsets.OFFSETS: (REFERENCE, placeholder)}),
                ),
                of.NAMED_DATA: (REFERENCE, writer.add_references([self._add_name(*entry) for entry in named.items()])),
            }
        )
        return writer.finish(program, header.PTE_MAGIC)

    def _add_plan(self, call: PayloadCall) -> int:
        of, writer = slots.ExecutionPlan, self._writer
        both = set(call.inputs) & set(call.outputs)
        values = [self._add_value(value, number in both) for number, value in enumerate(call.arguments)]
        empty = (REFERENCE, writer.add_text(""))
        structure = {slots.ContainerMetadata.ENCODED_INP_STR: empty, slots.ContainerMetadata.ENCODED_OUT_STR: empty}
        inputs, outputs = writer.add_numbers(INT32, call.inputs), writer.add_numbers(INT32, call.outputs)
        chain = self._add_chain(inputs, outputs, len(values))
        arenas = [0, self._memory] if self._memory else [0]
        fields = {
            of.NAME: writer.add_text(call.method),
            of.CONTAINER_META_TYPE: writer.add_table(structure),
            of.VALUES: writer.add_references(values),
            of.INPUTS: inputs,
            of.OUTPUTS: outputs,
            of.CHAINS: writer.add_references([chain]),
            of.OPERATORS: writer.add_references([]),
            of.DELEGATES: writer.add_references([self._add_delegate(call)]),
            of.NON_CONST_BUFFER_SIZES: writer.add_numbers(INT64, arenas),
        }
        return writer.add_table({slot: (REFERENCE, reference) for slot, reference in fields.items()})

    def _add_chain(self, inputs: int, outputs: int, arguments: int) -> int:
        writer = self._writer
        called_with = writer.add_numbers(INT32, range(arguments))
        delegate_call = writer.add_table({slots.DelegateCall.ARGS: (REFERENCE, called_with)})  # of delegate 0
        instruction = writer.add_table(
            {
                slots.Instruction.INSTR_ARGS_TYPE: (UINT8, slots.InstructionArguments.DELEGATE_CALL),
                slots.Instruction.INSTR_ARGS: (REFERENCE, delegate_call),
            }
        )
        return writer.add_table(
            {
                slots.Chain.INPUTS: (REFERENCE, inputs),
                slots.Chain.OUTPUTS: (REFERENCE, outputs),
                slots.Chain.INSTRUCTIONS: (REFERENCE, writer.add_references([instruction])),
            }
        )

    def _add_delegate(self, call: PayloadCall) -> int:
        of, writer = slots.BackendDelegate, self._writer
        specs = []
        for key, value in call.specs:
            texts = {slots.CompileSpec.KEY: writer.add_text(key), slots.CompileSpec.VALUE: writer.add_bytes(value)}
            specs.append(writer.add_table({slot: (REFERENCE, reference) for slot, reference in texts.items()}))
        place = slots.BackendDelegateDataReference
        segment = {place.LOCATION: (INT8, slots.DataLocation.SEGMENT), place.INDEX: (UINT32, 1)}
        return writer.add_table(
            {
                of.ID: (REFERENCE, writer.add_text(call.backend)),
                of.PROCESSED: (REFERENCE, writer.add_table(segment)),
                of.COMPILE_SPECS: (REFERENCE, writer.add_references(specs)),
            }
        )

    def _add_value(self, value: ValueSpec, planned: bool) -> int:
        tensor = value.content
        kind = slots.KernelTypes.TENSOR if isinstance(tensor, Tensor) else NULL
        content = self._add_tensor(tensor, planned) if isinstance(tensor, Tensor) else self._writer.add_table({})
        return self._writer.add_table(
            {slots.EValue.VAL_TYPE: (UINT8, kind), slots.EValue.VAL: (REFERENCE, content)},
        )

    def _add_tensor(self, tensor: Tensor, planned: bool) -> int:
        of, writer, dynamism = slots.Tensor, self._writer, slots.TensorShapeDynamism
        allocation = self._add_allocation(tensor.size) if planned else 0
        return writer.add_table(
            {
                of.SCALAR_TYPE: (INT8, CODES[tensor.dtype]),
                of.SIZES: (REFERENCE, writer.add_numbers(INT32, tensor.sizes)),
                of.DIM_ORDER: (REFERENCE, writer.add_bytes(bytes(tensor.dim_order))),
                of.ALLOCATION_INFO: (REFERENCE, allocation),
                of.SHAPE_DYNAMISM: (INT8, dynamism.DYNAMIC_BOUND if tensor.dynamic else dynamism.STATIC),
            }
        )

    def _add_allocation(self, size: int) -> int:
        of, start = slots.AllocationDetails, self._memory
        self._memory += _round_up(max(size, 1), _PLANNED_ALIGNMENT)
        return self._writer.add_table(
            {
                of.MEMORY_ID: (UINT32, _ARENA),
                of.MEMORY_OFFSET_LOW: (UINT32, start & 0xFFFFFFFF),
                of.MEMORY_OFFSET_HIGH: (UINT32, start >> 32),
            }
        )

    def _add_name(self, name: str, segment: int) -> int:
        of, key = slots.NamedData, self._writer.add_text(name)
        return self._writer.add_table({of.KEY: (REFERENCE, key), of.SEGMENT_INDEX: (UINT32, segment)})
