"""Planned memory over time: from which instruction to which each tensor is in use, and what makes the peak."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from exir_lowering.inspection.report import Arena, Memory, PlannedTensor
from exir_lowering.pte.code import DELEGATE, JUMP, KERNEL, MOVE, Code, PlanInstruction, items
from exir_lowering.pte.device_memory import DelegateMemory, DeviceMemory, add_up
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.kernel_signatures import signature as kernel_signature
from exir_lowering.pte.payloads import PayloadContent
from exir_lowering.pte.signatures import MethodSignature
from exir_lowering.pte.value_kinds import Tensor

_Spans = Mapping[int, tuple[int, int]]


def measure(code: Code, spec: MethodSpec, signature: MethodSignature) -> Memory:
    """Return what a method takes at run time."""
    instructions: list[PlanInstruction] = []
    for chain in code.chains:  # a jump names an instruction of its chain
        begin = len(instructions)
        instructions += [(kind, target + begin * (kind == JUMP), arguments) for kind, target, arguments in chain]
    begun = _begun(code, spec, instructions)
    names = _names(code, spec, signature, instructions, begun)
    spans = _spans(code, instructions, spec.state, begun)
    tensors: list[PlannedTensor] = []
    by_arena: dict[int, list[PlannedTensor]] = defaultdict(list)
    for value, known in enumerate(code.values):
        tensor = known.content
        if not isinstance(tensor, Tensor) or tensor.planned is None or value not in spans:
            continue
        name, dtype = names.get(value, f"value {value}"), str(tensor.dtype).removeprefix("torch.")
        where = tensor.planned.arena, tensor.planned.offset, 0 if tensor.unbound else tensor.size
        tensors.append(PlannedTensor(value, name, dtype, tensor.sizes, *where, *spans[value]))
        by_arena[tensor.planned.arena].append(tensors[-1])
    sizes = ((number, size) for number, size in enumerate(code.arenas) if number or size)
    arenas = tuple(_arena(number, size, by_arena[number]) for number, size in sizes)
    return Memory(arenas, tuple(tensors), sum(code.arenas))


def on_device(code: Code, spec: MethodSpec, checked: Sequence[PayloadContent | None], constants: int) -> DeviceMemory:
    """Return what a method takes on a device, with the bytes of weights that its kernels read in the file."""
    delegates = [
        DelegateMemory(payload.backend, len(payload.content) + sum(content.weights.values()), content.memory)
        if content is not None
        else DelegateMemory(payload.backend, len(payload.content), None)
        for payload, content in zip(code.payloads, checked, strict=True)  # in the order in which they are set up
    ]
    state = sum(tensor.size for index in spec.state if isinstance(tensor := code.values[index].content, Tensor))
    return add_up(sum(code.arenas), state, constants, delegates)


def _begun(code: Code, spec: MethodSpec, instructions: Sequence[PlanInstruction]) -> dict[int, int]:
    """Return since which instruction each value has its memory; a view, which no instruction makes, is known by it."""

    def place(value: int) -> Hashable:
        planned = code.place(value)
        return value if planned is None else planned

    begun = dict[int, int]()
    made: dict[Hashable, int] = {place(value): 0 for value in code.inputs}  # what wrote to some memory last
    for number, (kind, target, values) in enumerate(instructions):
        cut = len(values) - (spec.delegations[target].counts[0] if kind == DELEGATE else int(kind == MOVE))
        written: Sequence[int] = range(max(cut, 0), len(values))
        in_place = False
        if kind == KERNEL:
            known, in_place = kernel_signature(*code.operators[target]), code.operators[target][0].endswith("_")
            # An operator that nothing is known of writes to its last value, as a view does.
            at = {*known.written, *range(len(known.types), len(values))} if known is not None else ()
            written = sorted(at) or range(len(values) - 1, len(values))
        made_here = code.items(*(values[index] for index in written if index < len(values)))
        for value in code.items(*(value for index, value in enumerate(values) if in_place or index not in written)):
            begun.setdefault(value, made.get(place(value), number))
        for value in made_here:
            begun.setdefault(value, number)
            made[place(value)] = number
    return begun


def _names(
    code: Code,
    spec: MethodSpec,
    signature: MethodSignature,
    instructions: Sequence[PlanInstruction],
    begun: Mapping[int, int],
) -> dict[int, str]:
    """Return what values are called; those of no name, and views of them, by the call that makes them."""
    found: dict[int, str] = {}
    for value, number in begun.items():
        kind, target, _ = instructions[number]
        if kind in (KERNEL, DELEGATE):
            maker = code.operators[target][0].rpartition("::")[2] if kind == KERNEL else code.payloads[target].backend
            found[value] = f"value {value} of {number} {maker}"
    named = (*zip(code.outputs, signature.outputs, strict=True), *zip(code.inputs, signature.inputs, strict=True))
    found.update({index: value.name for index, value in named})
    found.update({index: value.name for index, value in zip(spec.state, signature.state, strict=True)})
    return found


def _spans(
    code: Code, instructions: Sequence[PlanInstruction], state: Sequence[int], begun: Mapping[int, int]
) -> _Spans:
    """Return the first and the last instruction that uses each value; a view begins with its base."""
    end = len(instructions)
    spans = {**dict.fromkeys(code.inputs, (0, 0)), **dict.fromkeys(state, (0, end))}
    for number, (_, _, arguments) in enumerate(instructions):
        for value in arguments:
            for index in items(code.values, value):
                first, last = spans.get(index, (begun[index], number))
                spans[index] = first, max(last, number)
    for index in code.outputs:
        spans[index] = spans.get(index, (end, end))[0], end
    loops = [(target, number) for number, (kind, target, _) in enumerate(instructions) if kind == JUMP]
    return _with_loops(spans, [(start, stop) for start, stop in loops if start <= stop])


def _with_loops(spans: _Spans, loops: Sequence[tuple[int, int]]) -> _Spans:
    """Extend spans: what is used in a loop and around it lasts as long as the loop does. Loops are nested."""
    found = dict(spans)
    for start, stop in sorted(loops, key=lambda loop: loop[1] - loop[0]):
        for value, (first, last) in found.items():
            if first < start <= last < stop:
                found[value] = first, stop
            elif start < first <= stop < last:
                found[value] = start, last
    return found


def _arena(number: int, size: int, tensors: Sequence[PlannedTensor]) -> Arena:
    """Return how much of an arena is in use at most, and by what; a view takes nothing beside its base."""
    peak, at, alive = 0, 0, list[PlannedTensor]()
    for time, begun in itertools.groupby(sorted(tensors, key=lambda tensor: tensor.first), lambda tensor: tensor.first):
        alive = [tensor for tensor in alive if tensor.last >= time] + list(begun)
        used = end = 0
        for tensor in sorted(alive, key=lambda tensor: tensor.offset):
            used += max(0, tensor.offset + tensor.bytes - max(end, tensor.offset))
            end = max(end, tensor.offset + tensor.bytes)
        if used > peak:
            peak, at = used, time
    most = [tensor for tensor in tensors if tensor.first <= at <= tensor.last] if peak else []
    most.sort(key=lambda tensor: (-tensor.bytes, tensor.value))
    return Arena(number, size, peak, at, tuple(tensor.value for tensor in most))
