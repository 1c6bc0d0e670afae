"""Planned memory over time: from which instruction to which each tensor is in use, and what makes the peak."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from exir_lowering.inspection.report import Arena, Memory, PlannedTensor
from exir_lowering.pte.code import Code
from exir_lowering.pte.instructions import DELEGATE, JUMP, KERNEL, PlanInstruction, items
from exir_lowering.pte.signatures import MethodSignature
from exir_lowering.pte.value_kinds import Tensor

_Spans = Mapping[int, tuple[int, int]]
_VALUE, _TENSOR, _DIMENSION, _CALL, _ARGUMENT = 24, 64, 9, 16, 8
"""Bytes that ExecuTorch's runtime takes for each, about; see `Memory.heap`."""


def measure(code: Code, signature: MethodSignature, state: Sequence[int], begun: Mapping[int, int]) -> Memory:
    """Return what a method takes at run time: `state` are values that are state, `begun` is that of `list_calls`."""
    instructions: list[PlanInstruction] = []
    for chain in code.chains:  # a jump names an instruction of its chain
        begin = len(instructions)
        instructions += [(kind, target + begin * (kind == JUMP), arguments) for kind, target, arguments in chain]
    names = _names(code, signature, state, instructions, begun)
    spans = _spans(code, instructions, state, begun)
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
    code: Code,
    signature: MethodSignature,
    state: Sequence[int],
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
    found.update({index: value.name for index, value in zip(state, signature.state, strict=True)})
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
    jumps = ((target, number) for number, (kind, target, _) in enumerate(instructions) if kind == JUMP)
    loops = [(target, number) for target, number in jumps if target <= number]
    return _with_loops(spans, loops) if loops else spans


def _with_loops(spans: _Spans, loops: Sequence[tuple[int, int]]) -> _Spans:
    """Extend spans: what is used in a loop and around it lasts as long as the loop does. Loops are nested."""
    backwards = {value: (-last, -first) for value, (first, last) in spans.items()}
    begins = _extend(backwards, [(-last, -first) for first, last in loops])
    ends = _extend({value: (-begins[value], last) for value, (_, last) in spans.items()}, loops)
    return {value: (-begins[value], ends[value]) for value in spans}


def _extend(spans: _Spans, loops: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return where each span ends with the loops that begin in it, but not with it, and that it ends in."""
    found: dict[int, int] = {}
    waiting, starts, ends = sorted(loops), list[int](), list[int]()  # those so far, joined where they overlap
    for value, (first, last) in sorted(spans.items(), key=lambda item: -item[1][0]):
        while waiting and waiting[-1][0] > first:
            start, end = waiting.pop()
            while starts and starts[-1] <= end:
                _, end = starts.pop(), max(end, ends.pop())
            starts.append(start)
            ends.append(end)
        at = bisect.bisect_left(starts, -last, key=operator.neg)  # the last one that begins before the end
        found[value] = max(last, ends[at]) if at < len(ends) else last
    return found


def _arena(number: int, size: int, tensors: Sequence[PlannedTensor]) -> Arena:
    """Return how much of an arena is in use at most, and by what."""
    memory = _Covered(edge for tensor in tensors for edge in (tensor.offset, tensor.offset + tensor.bytes))
    peak, at = 0, 0
    ending = sorted(tensors, key=lambda tensor: tensor.last)
    ended = 0
    for time, begun in itertools.groupby(sorted(tensors, key=lambda tensor: tensor.first), lambda tensor: tensor.first):
        while ended < len(ending) and ending[ended].last < time:
            memory.add(ending[ended], -1)
            ended += 1
        for tensor in begun:
            memory.add(tensor, 1)
        if memory.bytes > peak:
            peak, at = memory.bytes, time
    most = [tensor for tensor in tensors if tensor.first <= at <= tensor.last] if peak else []
    most.sort(key=lambda tensor: (-tensor.bytes, tensor.value))
    return Arena(number, size, peak, at, tuple(tensor.value for tensor in most))


class _Covered:
    """How many bytes tensors take together, as views have the memory of others: a segment tree over their ends."""

    def __init__(self, edges: Iterable[int]) -> None:
        self._edges = sorted(set(edges)) or [0]
        self._covers = [0] * (8 * len(self._edges))  # how many tensors cover a segment whole, and not the one above it
        self._bytes = [0] * (8 * len(self._edges))

    @property
    def bytes(self) -> int:
        return self._bytes[1]

    def add(self, tensor: PlannedTensor, count: int) -> None:
        """Add a tensor, or take it away."""
        self._add(tensor.offset, tensor.offset + tensor.bytes, count, 1, 0, len(self._edges) - 1)

    def _add(self, begin: int, end: int, count: int, segment: int, low: int, high: int) -> None:
        """Do so in a segment, which is from one edge to another, and in its halves."""
        first, last = self._edges[low], self._edges[high]
        if end <= first or last <= begin:
            return
        if begin <= first and last <= end:
            self._covers[segment] += count
        else:
            middle = (low + high) // 2
            self._add(begin, end, count, 2 * segment, low, middle)
            self._add(begin, end, count, 2 * segment + 1, middle, high)
        inside = self._bytes[2 * segment] + self._bytes[2 * segment + 1]
        self._bytes[segment] = last - first if self._covers[segment] else inside


def _heap(code: Code, instructions: Sequence[PlanInstruction]) -> dict[str, int]:
    tensors = [value.content for value in code.values if isinstance(value.content, Tensor)]
    return {
        "planned memory": sum(code.arenas),
        "values": _VALUE * len(code.values),
        "tensors": sum(_TENSOR + _DIMENSION * len(tensor.sizes) for tensor in tensors),
        "calls": sum(_CALL + _ARGUMENT * len(arguments) for _, _, arguments in instructions),
    }
