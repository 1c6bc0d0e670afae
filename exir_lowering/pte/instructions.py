"""The instructions of a method, checked: what they refer to is there, and of the kinds that kernels take.

A file does not say which of the values of a delegate call are outputs. A call names inputs and outputs in one list,
outputs last. Each value is written once, before it is read, so no instruction names an output before its call.
ExecuTorch numbers values as it makes them, the results of a call consecutively, and literal arguments after these. That
leaves one doubt: a view of a fixed shape is a separate value on the memory of another one, and no instruction makes it.
So a new value on memory that was written before may be a view that goes in, or an output on memory that is used again.
Then there is more than one answer, the likelier first; the delegate, which knows its payload, settles it by how many
outputs it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from exir_lowering.pte import slots
from exir_lowering.pte.flatbuffer import CorruptError, Table
from exir_lowering.pte.kernel_signatures import ANYTHING, Kinds, Signature
from exir_lowering.pte.slots import InstructionArguments as _Kinds, KernelTypes as K
from exir_lowering.pte.value_kinds import KINDS, Tensor, ValueSpec, check_index

PlanInstruction: TypeAlias = tuple[int, int, tuple[int, ...]]
"""The kind of an instruction, what it calls or where it jumps to, and the values it takes."""

KERNEL, DELEGATE, MOVE = _Kinds.KERNEL_CALL, _Kinds.DELEGATE_CALL, _Kinds.MOVE_CALL
JUMP, FREE = _Kinds.JUMP_FALSE_CALL, _Kinds.FREE_CALL
"""The kinds of instructions, by their numbers in the file."""


def output_counts(
    chains: Sequence[Sequence[PlanInstruction]],
    memory: Sequence[Hashable],  # for each value its planned memory and its type; None without planned memory
    items: Callable[[int], Sequence[int]],  # returns a value, or the values in a list of values
    given: Collection[int],  # the values there before the first instruction, besides those numbered before an input
    last_input: int,
) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return for each delegate that is called the values it is called with, and how many of them may be outputs."""
    calls: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    seen = {*given, *range(last_input + 1)}
    # How often each piece of memory was named since it was written.
    reads: dict[Hashable, int] = {memory[index]: 0 for index in seen if memory[index] is not None}
    for chain in chains:
        for code, target, arguments in chain:
            if code == DELEGATE and target not in calls:
                new = _new(arguments, seen)
                calls[target] = arguments, _counts(arguments[len(arguments) - new :], memory, reads)
            for index in dict.fromkeys(item for value in arguments for item in (value, *items(value))):
                piece = memory[index]
                if piece is not None:
                    reads[piece] = reads[piece] + 1 if index in seen and piece in reads else 0
                seen.add(index)
    return calls


def _new(arguments: Sequence[int], seen: Collection[int]) -> int:
    """Return how many of the last values are numbered consecutively and were named by no instruction before."""
    count = 0
    for position in range(len(arguments) - 1, -1, -1):
        index = arguments[position]
        if index in seen or (count and index != arguments[position + 1] - 1):
            break
        count += 1
    return count


def _counts(new: Sequence[int], memory: Sequence[Hashable], reads: Mapping[Hashable, int]) -> tuple[int, ...]:
    """Return how many of some new values may be outputs. The last one is: each delegate returns something."""
    views = [position for position, index in enumerate(new[:-1]) if memory[index] in reads]
    # Memory that was written and not read since would be of no use, but for a view of it.
    surely = [position for position in views if reads[memory[new[position]]] == 0]
    likely = len(new) - 1 - surely[-1] if surely else len(new)
    return tuple(dict.fromkeys((likely, len(new), *(len(new) - 1 - position for position in views))))


_ITEMS: Mapping[int, int] = {K.INT_LIST: K.INT, K.TENSOR_LIST: K.TENSOR, K.OPTIONAL_TENSOR_LIST: K.TENSOR}
"""Kinds of lists whose items are values themselves, with the kind of the items."""


_TRUTH = frozenset({K.BOOL})


@dataclass(frozen=True, slots=True)
class Body:
    """The instructions of a method, with what they refer to."""

    chains: Sequence[Sequence[PlanInstruction]]
    values: Sequence[ValueSpec]
    operators: Sequence[tuple[str, str]]  # that are called, each with its overload
    signatures: Sequence[Signature | None]  # of the operators
    delegates: int  # how many there are
    inputs: frozenset[int]  # indices of values, as are the outputs
    outputs: frozenset[int]
    # The kinds of values that instructions make, by value; `check_calls` finds them.
    results: dict[int, Kinds] = field(default_factory=dict)

    def instructions(self) -> Iterator[PlanInstruction]:
        """Return all instructions."""
        for chain in self.chains:
            yield from chain

    def kinds(self, index: int) -> Kinds:
        """Return what a value can be when the method runs; `ANYTHING` when that is not known."""
        kind = self.values[index].kind
        if kind == K.NULL and index in self.inputs:
            return ANYTHING  # nobody can give it, so the method never runs
        if index not in self.results:
            return frozenset({kind})
        made = self.results[index]
        return made if kind == K.NULL or not made or self.redeclared(index) else made | {kind}

    def redeclared(self, index: int) -> bool:
        """Return whether a value is declared as something else than what is made: ExecuTorch has truths as ints."""
        return index not in self.inputs and self.values[index].kind == K.INT and self.results.get(index) == _TRUTH

    def items(self, index: int) -> tuple[int, ...]:
        """Return a value, or the values in a list of values."""
        return items(self.values, index)

    def written(self, instruction: PlanInstruction) -> tuple[int, ...]:
        """Return what a kernel writes to; () for other instructions, and where that is not known."""
        code, target, arguments = instruction
        signature = self.signatures[target] if code == KERNEL else None
        return () if signature is None else tuple(arguments[at] for at in signature.written if at < len(arguments))

    def name(self, target: int) -> str:
        """Return the name of an operator."""
        return ".".join(part for part in self.operators[target] if part)


def items(values: Sequence[ValueSpec], index: int) -> tuple[int, ...]:
    """Return a value, or the values in a list of values."""
    value = values[index]
    if value.kind in _ITEMS and isinstance(value.content, tuple):
        return tuple(int(item) for item in value.content if item != -1)  # -1 is None
    return (index,)


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


_FIELDS: Mapping[int, tuple[int | None, tuple[int, ...]]] = {
    KERNEL: (slots.KernelCall.OP_INDEX, (slots.KernelCall.ARGS,)),
    DELEGATE: (slots.DelegateCall.DELEGATE_INDEX, (slots.DelegateCall.ARGS,)),
    MOVE: (None, (slots.MoveCall.MOVE_FROM, slots.MoveCall.MOVE_TO)),
    JUMP: (slots.JumpFalseCall.DESTINATION_INSTRUCTION, (slots.JumpFalseCall.COND_VALUE_INDEX,)),
    FREE: (None, (slots.ONLY,)),
}
"""For each kind of instruction, the fields with its target, and with the values it takes: for calls a list of them."""


def check_calls(body: Body) -> frozenset[int]:
    """Check instructions, or raise a CorruptError; return the inputs that are None and read as something else."""
    for chain in body.chains:
        for code, target, arguments in chain:
            if code == KERNEL:
                check_index(target, len(body.operators), "a kernel call", "operators")
                _check_number(body, target, arguments)
            elif code == DELEGATE:
                check_index(target, body.delegates, "a delegate call", "delegates")
            elif code == JUMP:
                check_index(target, len(chain) + 1, "a jump", "instructions")
    _find_results(body)
    read: set[int] = set()
    for number in range(len(body.values)):
        _check_list(number, body)
    for code, target, arguments in body.instructions():
        if code == KERNEL:
            _check_call(body, target, arguments, read)
        elif code == JUMP and body.kinds(arguments[0]) - {K.BOOL, K.TENSOR}:
            raise CorruptError(f"a jump depends on value {arguments[0]}, which is not a bool")
    return frozenset(read)


def _check_number(body: Body, target: int, arguments: Sequence[int]) -> None:
    """Check how many values a kernel is called with."""
    found = body.signatures[target]
    if found is not None and len(arguments) < len(found.types) + (0 if found.written else found.results):
        expected = len(found.types) + found.results
        raise CorruptError(f"{body.name(target)} is called with {len(arguments)} values, but takes {expected}")


def _find_results(body: Body) -> None:
    """Find the kinds of the values that instructions make, in rounds: they may depend on what later ones make."""
    changed = True
    while changed:
        changed = False
        for instruction in body.instructions():
            for index, kinds in _results(body, *instruction):
                changed |= _add(body, index, kinds)


def _results(body: Body, code: int, target: int, arguments: Sequence[int]) -> Iterator[tuple[int, Kinds]]:
    """Yield what an instruction makes, with its kinds as far as they are known."""
    called = body.signatures[target] if code == KERNEL else None
    if code == MOVE:
        yield arguments[1], body.kinds(arguments[0])
    elif called is not None and not called.written:
        given = arguments[: len(called.types)]
        for index in arguments[len(given) : len(given) + called.results]:
            yield index, called.returned or _infer_results(body, given)
    elif called is None and code in (KERNEL, DELEGATE):
        yield from ((index, ANYTHING) for index in arguments if body.values[index].kind == K.NULL)


def _add(body: Body, index: int, kinds: Kinds) -> bool:
    """Add kinds to what a value can be; return whether that is news."""
    before = body.results.get(index)
    body.results[index] = kinds if before is None or not kinds else before and before | kinds
    return body.results[index] != before


def _infer_results(body: Body, arguments: Sequence[int]) -> Kinds:
    """Return the kinds of the number that an operator computes from a tensor or from numbers."""
    for index in arguments:
        tensor = body.values[index].content
        if isinstance(tensor, Tensor):
            real = tensor.dtype.is_floating_point
            return frozenset({K.BOOL if tensor.dtype == torch.bool else K.DOUBLE if real else K.INT})
    given = [body.kinds(index) for index in arguments]
    if not all(given):
        return ANYTHING
    if any(kinds == {K.DOUBLE} for kinds in given):
        return frozenset({K.DOUBLE})
    return frozenset({K.INT, K.DOUBLE}) if any(K.DOUBLE in kinds for kinds in given) else frozenset({K.INT})


def _check_list(number: int, body: Body) -> None:
    """Check a list whose items are values themselves."""
    value = body.values[number]
    wanted = _ITEMS.get(value.kind)
    if wanted is None or not isinstance(value.content, tuple):
        return
    allowed = {wanted, K.NULL} if value.kind == K.OPTIONAL_TENSOR_LIST else {wanted}
    for index in value.content:
        if index == -1 and value.kind == K.OPTIONAL_TENSOR_LIST:
            continue
        check_index(int(index), len(body.values), f"value {number}", "values")
        wrong = body.kinds(int(index)) - allowed
        if wrong:
            raise CorruptError(f"value {number} is {KINDS[value.kind]}, but contains {KINDS[min(wrong)]}")


def _check_call(body: Body, target: int, arguments: Sequence[int], read: set[int]) -> None:
    """Check what a kernel is called with; add the inputs that it reads but nobody can give."""
    found = body.signatures[target]
    if found is None:
        return
    for position, (index, type_, allowed) in enumerate(zip(arguments, found.types, found.accepted, strict=False)):
        if not allowed:
            continue
        lost = {item for item in body.items(index) if body.values[item].kind == K.NULL and item in body.inputs}
        read.update(lost if K.NULL not in allowed or index not in lost else ())
        wrong = body.kinds(index) - allowed
        if wrong:
            raise CorruptError(f"{body.name(target)} is called with {KINDS[min(wrong)]} for its {type_}")
        if position in found.written:
            for item in body.items(index):
                content = body.values[item].content
                if isinstance(content, Tensor) and content.constant:
                    raise CorruptError(f"{body.name(target)} writes into value {item}, which is a constant")
