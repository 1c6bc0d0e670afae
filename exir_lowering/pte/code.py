"""The code of a file's methods, read from their tables: values, instructions and payloads.

What is read refers to nothing that does not exist; `format` checks what it is about.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from exir_lowering.pte import slots
from exir_lowering.pte.container import Data, open_program
from exir_lowering.pte.flatbuffer import CorruptError, Table
from exir_lowering.pte.kernel_signatures import signature
from exir_lowering.pte.slots import ExecutionPlan, InstructionArguments as _Kinds, KernelTypes as K
from exir_lowering.pte.value_kinds import KINDS, Allocation, MemoryLayout, Tensor, ValueSpec, check_index, layout

PlanInstruction: TypeAlias = tuple[int, int, tuple[int, ...]]
"""The kind of an instruction, what it calls or where it jumps to, and the values it takes."""

KERNEL, DELEGATE, MOVE = _Kinds.KERNEL_CALL, _Kinds.DELEGATE_CALL, _Kinds.MOVE_CALL
JUMP, FREE = _Kinds.JUMP_FALSE_CALL, _Kinds.FREE_CALL
"""The kinds of instructions, by their numbers in the file."""

_FIELDS: Mapping[int, tuple[int | None, tuple[int, ...]]] = {
    KERNEL: (slots.KernelCall.OP_INDEX, (slots.KernelCall.ARGS,)),
    DELEGATE: (slots.DelegateCall.DELEGATE_INDEX, (slots.DelegateCall.ARGS,)),
    MOVE: (None, (slots.MoveCall.MOVE_FROM, slots.MoveCall.MOVE_TO)),
    JUMP: (slots.JumpFalseCall.DESTINATION_INSTRUCTION, (slots.JumpFalseCall.COND_VALUE_INDEX,)),
    FREE: (None, (slots.ONLY,)),
}
"""For each kind of instruction, the fields with its target, and with the values it takes: for calls a list of them."""

_ITEMS: Mapping[int, int] = {K.INT_LIST: K.INT, K.TENSOR_LIST: K.TENSOR, K.OPTIONAL_TENSOR_LIST: K.TENSOR}
"""Kinds of lists whose items are values themselves, with the kind of the items."""


def read_instruction(table: Table, size: int) -> PlanInstruction:
    """Return an instruction's kind, its target and the values it takes; a CorruptError if one does not exist."""
    code, content = table.number(slots.Instruction.INSTR_ARGS_TYPE, "B"), table.table(slots.Instruction.INSTR_ARGS)
    if code not in _FIELDS or content is None:
        raise CorruptError(f"an instruction has the unknown type {code}")
    target, fields = _FIELDS[code]
    if code in (KERNEL, DELEGATE):
        if not content.has(fields[0]):
            raise CorruptError("a call has no list of arguments")
        arguments = content.numbers(fields[0], "i")
    else:
        arguments = tuple(content.number(field, "i") for field in fields)
    for index in arguments:
        check_index(index, size, "an instruction", "values")
    return code, 0 if target is None else content.number(target, "i"), arguments


def items(values: Sequence[ValueSpec], index: int) -> tuple[int, ...]:
    """Return a value, or the values in a list of values."""
    value = values[index]
    if value.kind in _ITEMS and isinstance(value.content, tuple):
        return tuple(int(item) for item in value.content if item != -1)  # -1 is None
    return (index,)


_CODES: Mapping[int, str] = {
    **{K.INT: "q", K.BOOL: "B", K.DOUBLE: "d", K.INT_LIST: "q", K.BOOL_LIST: "B", K.DOUBLE_LIST: "d"},
    **{K.TENSOR_LIST: "i", K.OPTIONAL_TENSOR_LIST: "i"},
}
"""The types of numbers, and of the items of lists."""


def _value(
    number: int, table: Table, arenas: Sequence[int], data: Data, external: dict[str, MemoryLayout]
) -> ValueSpec:
    """Read a value; a tensor in a data file is added to `external`, by name."""
    kind = table.number(slots.EValue.VAL_TYPE, "B")
    content = table.table(slots.EValue.VAL)
    if kind not in KINDS or (content is None and kind != K.NULL):
        raise CorruptError(f"value {number} has the unknown type {kind}, or no content")
    if content is None or kind == K.NULL:
        return ValueSpec(K.NULL, None)
    if kind == K.TENSOR:
        try:
            tensor = _tensor(content, arenas, data)
            known = layout(content, slots.Tensor)
            if tensor.external and external.setdefault(str(tensor.label), known) != known:
                raise CorruptError(
                    f"the tensor {tensor.label!r} of a data file is both {external[str(tensor.label)]} and {known}"
                )
        except CorruptError as error:
            raise CorruptError(f"value {number}: {error}") from None
        return ValueSpec(kind, tensor)
    if kind in (K.INT, K.BOOL, K.DOUBLE):
        found = content.number(slots.ONLY, _CODES[kind])
        return ValueSpec(kind, bool(found) if kind == K.BOOL else found)
    # These have no default: the runtime reads them without checking.
    if not content.has(slots.ONLY):
        raise CorruptError(f"value {number} is {KINDS[kind]} without content")
    return ValueSpec(kind, content.text(slots.ONLY) if kind == K.STRING else content.numbers(slots.ONLY, _CODES[kind]))


def _tensor(table: Table, arenas: Sequence[int], data: Data) -> Tensor:
    """Read a tensor; CorruptError when it is beyond the memory, or the file."""
    what = layout(table, slots.Tensor)
    dynamism, offset = table.number(slots.Tensor.SHAPE_DYNAMISM, "b"), table.number(slots.Tensor.STORAGE_OFFSET, "i")
    fixed, unbound = dynamism == slots.TensorShapeDynamism.STATIC, dynamism == slots.TensorShapeDynamism.DYNAMIC_UNBOUND
    if not fixed and not unbound and dynamism != slots.TensorShapeDynamism.DYNAMIC_BOUND:
        raise CorruptError(f"a tensor has the unknown dynamism {dynamism}")
    if offset:
        raise CorruptError(f"a tensor starts at element {offset} of its memory, which is not supported")
    size = 0 if unbound else what.size
    if size >= 1 << 62:
        raise CorruptError(f"a tensor of the shape {list(what.sizes)} has {size} bytes")
    planned, details = None, table.table(slots.Tensor.ALLOCATION_INFO)
    if details is not None:
        of = slots.AllocationDetails
        low, high, memory = (
            details.number(each, "I") for each in (of.MEMORY_OFFSET_LOW, of.MEMORY_OFFSET_HIGH, of.MEMORY_ID)
        )
        planned = Allocation(memory, offset := low + (high << 32))
        if not 0 < memory < len(arenas) or offset + size > arenas[memory]:
            raise CorruptError(f"a tensor of {size} bytes at byte {offset} of memory {memory} of {list(arenas)}")
        if offset % what.dtype.itemsize:
            raise CorruptError(f"a tensor of {what.dtype} would start at byte {offset} of its memory")
    made = Tensor(what.dtype, what.sizes, what.dim_order, not fixed, unbound, planned)
    which, extra = 0, table.table(slots.Tensor.EXTRA_TENSOR_INFO)
    if extra is not None:
        location = extra.number(slots.ExtraTensorInfo.LOCATION, "b")
        made = replace(made, label=extra.text(slots.ExtraTensorInfo.FULLY_QUALIFIED_NAME) or None)
        which = extra.number(slots.ExtraTensorInfo.MUTABLE_DATA_SEGMENTS_IDX, "Q")
        if location == slots.TensorDataLocation.EXTERNAL:
            if made.label is None:
                raise CorruptError("a tensor in a data file has no name")
            return replace(made, external=True)
        if location != slots.TensorDataLocation.SEGMENT:
            raise CorruptError(f"a tensor has the unknown location {location}")
    constant = table.number(slots.Tensor.DATA_BUFFER_IDX, "I")
    if not constant:
        return made
    if planned is None and data.inline_constants:
        check_index(constant, len(data.inline_constants), "a tensor", "constants")
        start, segment = 0, data.inline_constants[constant]
    else:
        if planned is not None:
            check_index(which, min(len(data.initial), 1), "a tensor", "lists of initial values")  # the runtime has one
        offsets = data.constants if planned is None else data.initial[which]
        check_index(constant, len(offsets), "a tensor", "constants")
        start, segment = offsets[constant]
    if start + size > len(segment):
        raise CorruptError(f"a tensor of {size} bytes at byte {start} of a segment of {len(segment)} bytes")
    return replace(made, content=segment[start:])


_Made = TypeVar("_Made")

_NEEDED = (
    *(ExecutionPlan.VALUES, ExecutionPlan.INPUTS, ExecutionPlan.OUTPUTS, ExecutionPlan.CHAINS),
    *(ExecutionPlan.OPERATORS, ExecutionPlan.DELEGATES, ExecutionPlan.NON_CONST_BUFFER_SIZES),
)
"""The fields of a method that the runtime reads without checking that they are present."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A payload of a method, with the backend and its compile specs."""

    backend: str
    content: memoryview
    specs: tuple[tuple[str, bytes], ...]  # keys and values


@dataclass(frozen=True, slots=True)
class Code:
    """The code of a method."""

    name: str
    values: tuple[ValueSpec, ...]
    inputs: tuple[int, ...]  # indices of values, as are the outputs
    outputs: tuple[int, ...]
    chains: tuple[tuple[PlanInstruction, ...], ...]
    operators: tuple[tuple[str, str], ...]  # of the instructions, each with its overload
    payloads: tuple[Payload, ...]  # what backends execute
    arenas: tuple[int, ...]  # the sizes of its planned memory
    external: Mapping[str, MemoryLayout]  # what tensors in data files have to be, by name

    def instructions(self) -> Iterator[PlanInstruction]:
        """Return all instructions."""
        return itertools.chain.from_iterable(self.chains)

    def items(self, *indices: int) -> dict[int, None]:
        """Return values, of lists the values in them."""
        return dict.fromkeys(item for index in indices for item in items(self.values, index))

    def written(self, instruction: PlanInstruction) -> tuple[int, ...]:
        """Return what a kernel writes to; () for other instructions, and where that is not known."""
        code, target, arguments = instruction
        known = signature(*self.operators[target]) if code == KERNEL else None
        return () if known is None else tuple(arguments[at] for at in known.written if at < len(arguments))

    def place(self, index: int) -> Allocation | None:
        """Return where a value lies in planned memory."""
        tensor = self.values[index].content
        return tensor.planned if isinstance(tensor, Tensor) else None


def read_methods(file: memoryview, make: Callable[[Code, Data], _Made]) -> tuple[dict[str, _Made], Data]:
    """Return what a function makes of each method's code, by name, and the data; a CorruptError if it is damaged."""
    program, data = open_program(file)
    made: dict[str, _Made] = {}
    for plan in program.tables(slots.Program.EXECUTION_PLAN):
        name = plan.text(ExecutionPlan.NAME)
        try:
            if not name:
                raise CorruptError("it has no name")
            one = make(_read(name, plan, data), data)
        except CorruptError as error:
            raise CorruptError(f"method {name!r}: {error}") from None
        if name in made:
            raise CorruptError(f"it has two methods {name!r}")
        made[name] = one
    if not made:
        raise CorruptError("it has no method")
    return {name: made[name] for name in sorted(made)}, data


def _read(name: str, plan: Table, data: Data) -> Code:
    missing = [field.name.lower() for field in _NEEDED if not plan.has(field)]
    if missing:
        raise CorruptError(f"it has no list of {' or '.join(missing)}")
    arenas = plan.numbers(ExecutionPlan.NON_CONST_BUFFER_SIZES, "q")
    if any(size < 0 for size in arenas):
        raise CorruptError(f"its planned memory has the sizes {list(arenas)}")
    external: dict[str, MemoryLayout] = {}
    tables = enumerate(plan.tables(ExecutionPlan.VALUES))
    values = tuple(_value(number, table, arenas, data, external) for number, table in tables)
    for number, value in enumerate(values):
        wanted = _ITEMS.get(value.kind)
        for index in value.content if wanted is not None and isinstance(value.content, tuple) else ():
            if index == -1 and value.kind == K.OPTIONAL_TENSOR_LIST:
                continue
            check_index(int(index), len(values), f"value {number}", "values")
            found = values[int(index)].kind
            if wanted == K.TENSOR and found not in (K.TENSOR, K.NULL):  # integers may be computed
                raise CorruptError(f"value {number} is {KINDS[value.kind]}, but contains {KINDS[found]}")
    inputs, outputs = plan.numbers(ExecutionPlan.INPUTS, "i"), plan.numbers(ExecutionPlan.OUTPUTS, "i")
    for index in (*inputs, *outputs):
        check_index(index, len(values), "an input or output", "values")
    operators = []
    for table in plan.tables(ExecutionPlan.OPERATORS):
        if not table.has(slots.Operator.NAME) or not table.has(slots.Operator.OVERLOAD):
            raise CorruptError("an operator has no name, or no overload")
        operators.append((table.text(slots.Operator.NAME), table.text(slots.Operator.OVERLOAD)))
    payloads = tuple(_payload(table, data) for table in plan.tables(ExecutionPlan.DELEGATES))
    chains = []
    for table in plan.tables(ExecutionPlan.CHAINS):
        if not table.has(slots.Chain.INSTRUCTIONS):
            raise CorruptError("a chain has no list of instructions")
        chains.append(tuple(read_instruction(one, len(values)) for one in table.tables(slots.Chain.INSTRUCTIONS)))
    return Code(name, values, inputs, outputs, tuple(chains), tuple(operators), payloads, arenas, external)


def _payload(delegate: Table, data: Data) -> Payload:
    backend, reference = delegate.text(slots.BackendDelegate.ID), delegate.table(slots.BackendDelegate.PROCESSED)
    if not backend or not delegate.has(slots.BackendDelegate.COMPILE_SPECS):
        raise CorruptError(f"a delegate has no backend, or no list of compile specs: {backend!r}")
    if reference is None:
        raise CorruptError(f"a delegate of {backend!r} has no payload")
    specs = []
    for spec in delegate.tables(slots.BackendDelegate.COMPILE_SPECS):
        if not spec.has(slots.CompileSpec.KEY) or not spec.has(slots.CompileSpec.VALUE):
            raise CorruptError(f"a compile spec of {backend!r} has no key, or no value")
        specs.append((spec.text(slots.CompileSpec.KEY), bytes(spec.content(slots.CompileSpec.VALUE))))
    location = reference.number(slots.BackendDelegateDataReference.LOCATION, "b")
    index = reference.number(slots.BackendDelegateDataReference.INDEX, "I")
    if location not in (slots.DataLocation.INLINE, slots.DataLocation.SEGMENT):
        raise CorruptError(f"a payload of {backend!r} has the unknown location {location}")
    contents = data.segments if location == slots.DataLocation.SEGMENT else data.inline_payloads
    check_index(index, len(contents), f"a payload of {backend!r}", "payloads")
    return Payload(backend, contents[index], tuple(specs))
