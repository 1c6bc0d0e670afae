"""Planned memory over time: from which instruction to which each tensor is in use, and what makes the peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from exir_lowering.inspection.report import Arena, Memory, PlannedTensor
from exir_lowering.pte.code import Code
from exir_lowering.pte.dataflow import DELEGATE, JUMP, KERNEL, PlanInstruction
from exir_lowering.pte.instructions import items
from exir_lowering.pte.peak import find_peak
from exir_lowering.pte.signatures import MethodSignature
from exir_lowering.pte.value_kinds import Tensor

_VALUE, _TENSOR, _DIMENSION, _CALL, _ARGUMENT = 24, 64, 9, 16, 8
"""Bytes that ExecuTorch's runtime takes for each, about; see `Memory.heap`."""


def measure(code: Code, signature: MethodSignature, state: Sequence[int]) -> Memory:
    """Return what a method takes at run time; `state` are the values that are state."""
    instructions: list[PlanInstruction] = []
    for chain in code.chains:  # a jump names an instruction of its chain
        begin = len(instructions)
        instructions += [(kind, target + begin * (kind == JUMP), arguments) for kind, target, arguments in chain]
    names = _names(code, signature, state, instructions)
    spans = _spans(code, instructions, state)
    tensors: list[PlannedTensor] = []
    by_arena: dict[int, list[PlannedTensor]] = defaultdict(list)
    for value, (spec, storage) in enumerate(zip(code.values, code.storage, strict=True)):
        tensor = spec.content
        if not isinstance(tensor, Tensor) or storage is None or storage.planned is None or value not in spans:
            continue
        name, dtype = names.get(value, f"value {value}"), str(tensor.dtype).removeprefix("torch.")
        where = storage.planned.arena, storage.planned.offset, 0 if tensor.unbound else tensor.size
        tensors.append(PlannedTensor(value, name, dtype, tensor.sizes, *where, *spans[value]))
        by_arena[storage.planned.arena].append(tensors[-1])
    sizes = ((number, size) for number, size in enumerate(code.arenas) if number or size)
    arenas = tuple(_arena(number, size, by_arena[number]) for number, size in sizes)
    return Memory(arenas, tuple(tensors), _heap(code, instructions))


def _names(
    code: Code, signature: MethodSignature, state: Sequence[int], instructions: Sequence[PlanInstruction]
) -> dict[int, str]:
    """Return what values are called; those of no name by the last value of a call that they are."""
    found: dict[int, str] = {}
    for number, (kind, target, arguments) in enumerate(instructions):
        if kind in (KERNEL, DELEGATE) and arguments:
            maker = code.operators[target][0].rpartition("::")[2] if kind == KERNEL else code.payloads[target].backend
            found.setdefault(arguments[-1], f"value {arguments[-1]} of {number} {maker}")
    named = (*zip(code.outputs, signature.outputs, strict=True), *zip(code.inputs, signature.inputs, strict=True))
    found.update({index: value.name for index, value in named})
    found.update({index: value.name for index, value in zip(state, signature.state, strict=True)})
    return found


def _spans(code: Code, instructions: Sequence[PlanInstruction], state: Sequence[int]) -> Mapping[int, tuple[int, int]]:
    """Return the first and the last instruction that uses each value."""
    end = len(instructions)
    spans = {**dict.fromkeys(code.inputs, (0, 0)), **dict.fromkeys(state, (0, end))}
    for number, (_, _, arguments) in enumerate(instructions):
        for value in arguments:
            for index in (value, *items(code.values, value)):
                first, last = spans.get(index, (number, number))
                spans[index] = first, max(last, number)
    for index in code.outputs:
        spans[index] = spans.get(index, (end, end))[0], end
    for number, (kind, target, _) in enumerate(instructions):
        if kind == JUMP and target <= number:  # a loop: what is used in it and around it lasts as long as it does
            for index, (first, last) in spans.items():
                if first <= number and last >= target and not (target <= first and last <= number):
                    spans[index] = min(first, target), max(last, number)
    return spans


def _arena(number: int, size: int, tensors: Sequence[PlannedTensor]) -> Arena:
    """Return how much of an arena is in use at most, and by what."""
    peak, at, most = find_peak(tensors)
    return Arena(number, size, peak, at, tuple(tensor.value for tensor in most))


def _heap(code: Code, instructions: Sequence[PlanInstruction]) -> dict[str, int]:
    tensors = [value.content for value in code.values if isinstance(value.content, Tensor)]
    return {
        "planned memory": sum(code.arenas),
        "values": _VALUE * len(code.values),
        "tensors": sum(_TENSOR + _DIMENSION * len(tensor.sizes) for tensor in tensors),
        "calls": sum(_CALL + _ARGUMENT * len(arguments) for _, _, arguments in instructions),
    }
