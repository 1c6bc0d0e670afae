"""Find which of the values that a delegate is called with are its outputs: a file does not say.

A call names inputs and outputs in one list, outputs last. Each value is written once, before it is read, so no
instruction names an output before its call. ExecuTorch numbers values as it makes them, the results of a call
consecutively, and literal arguments after these. That leaves one doubt: a view of a fixed shape is a separate value
on the memory of another one, and no instruction makes it. So a new value on memory that was written before may be a
view that goes in, or an output on memory that is used again. Then there is more than one answer, the likelier first;
the delegate, which knows its payload, settles it by how many outputs it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TypeAlias

from exir_lowering.pte.slots import InstructionArguments as _Kinds

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
