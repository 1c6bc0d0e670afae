"""The instructions of a method: their kinds, what they call, and the values that they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from exir_lowering.pte import slots
from exir_lowering.pte.flatbuffer import CorruptError, Table
from exir_lowering.pte.slots import InstructionArguments as _Kinds, KernelTypes as K
from exir_lowering.pte.value_kinds import ValueSpec, check_index

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

ITEMS: Mapping[int, int] = {K.INT_LIST: K.INT, K.TENSOR_LIST: K.TENSOR, K.OPTIONAL_TENSOR_LIST: K.TENSOR}
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
    if value.kind in ITEMS and isinstance(value.content, tuple):
        return tuple(int(item) for item in value.content if item != -1)  # -1 is None
    return (index,)
