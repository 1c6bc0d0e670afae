"""Planned memory over time: from which instruction to which each tensor is in use, and what makes the peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from exir_lowering.inspection.report import Arena, Memory, PlannedTensor
from exir_lowering.pte.code import Code
from exir_lowering.pte.dataflow import DELEGATE, JUMP, KERNEL, PlanInstruction
from exir_lowering.pte.instructions import items
from exir_lowering.pte.signatures import MethodSignature
from exir_lowering.pte.value_kinds import Tensor

_VALUE, _TENSOR, _DIMENSION, _CALL, _ARGUMENT = 24, 64, 9, 16, 8
"""Bytes that ExecuTorch's runtime takes for each, about; see `Memory.heap`."""


def measure(code: Code, signature: MethodSignature, state: Sequence[int]) -> Memory:
    """Return what a method takes at run time; `state` are the values that are state."""
    instructions = [instruction for chain in code.chains for instruction in chain]
    names = _names(code, signature, state, instructions)
    spans = _spans(code, instructions, state)
    tensors = []
    for value, (spec, storage) in enumerate(zip(code.values, code.storage, strict=True)):
        tensor = spec.content
        if not isinstance(tensor, Tensor) or storage is None or storage.planned is None or value not in spans:
            continue
        name, dtype = names.get(value, f"value {value}"), str(tensor.dtype).removeprefix("torch.")
        where = storage.planned.arena, storage.planned.offset, 0 if tensor.unbound else tensor.size
        tensors.append(PlannedTensor(value, name, dtype, tensor.sizes, *where, *spans[value]))
    arenas = tuple(
        _arena(number, size, [tensor for tensor in tensors if tensor.arena == number])
        for number, size in enumerate(code.arenas)
        if number or size
    )
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
    peak, at = 0, 0
    most: tuple[PlannedTensor, ...] = ()
    for time, live in _live(tensors):
        used = _union(live)
        if used > peak:
            peak, at, most = used, time, tuple(live)
    ordered = sorted(most, key=lambda tensor: (-tensor.bytes, tensor.value))
    return Arena(number, size, peak, at, tuple(tensor.value for tensor in ordered))


def _live(tensors: Sequence[PlannedTensor]) -> Iterator[tuple[int, list[PlannedTensor]]]:
    """Yield what is in use whenever something begins to be."""
    live: list[PlannedTensor] = []
    waiting = sorted(tensors, key=lambda tensor: tensor.first)
    for number, tensor in enumerate(waiting):
        live = [one for one in live if one.last >= tensor.first]
        live.append(tensor)
        if number + 1 == len(waiting) or waiting[number + 1].first > tensor.first:
            yield tensor.first, live


def _union(tensors: Sequence[PlannedTensor]) -> int:
    """Return how many bytes tensors take together: views have the memory of others."""
    total = end = 0
    for start, stop in sorted((tensor.offset, tensor.offset + tensor.bytes) for tensor in tensors):
        total += max(stop - max(start, end), 0)
        end = max(end, stop)
    return total


def _heap(code: Code, instructions: Sequence[PlanInstruction]) -> dict[str, int]:
    tensors = [value.content for value in code.values if isinstance(value.content, Tensor)]
    return {
        "planned memory": sum(code.arenas),
        "values": _VALUE * len(code.values),
        "tensors": sum(_TENSOR + _DIMENSION * len(tensor.sizes) for tensor in tensors),
        "calls": sum(_CALL + _ARGUMENT * len(arguments) for _, _, arguments in instructions),
    }
