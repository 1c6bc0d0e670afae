"""Check the control flow of a method: no value is read before it is made, and each loop can end."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from exir_lowering.pte.dataflow import DELEGATE, FREE, JUMP, KERNEL, MOVE, PlanInstruction
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.instructions import Body
from exir_lowering.pte.slots import KernelTypes as K
from exir_lowering.pte.value_kinds import Tensor

_VIEW = ("executorch_prim::et_view", "default")


def check_flow(body: Body) -> None:
    """Refuse what the runtime does not survive: values read before they are made, tensors without memory, loops."""
    for chain in body.chains:
        _check_loops(body, chain)
    waiting = {index: 1 << number for number, index in enumerate(_find_waiting(body))}
    if not waiting:
        return
    ready = 0
    for chain in body.chains:
        ready = _check_chain(body, chain, waiting, ready)
    for index in body.outputs & waiting.keys():
        if not waiting[index] & ready and isinstance(body.values[index].content, Tensor):
            raise CorruptError(f"output value {index} has no memory")


def _find_waiting(body: Body) -> Iterator[int]:
    """Return the values that do not exist before an instruction makes them: numbers, and tensors without memory."""
    given = body.inputs | body.outputs
    for index, value in enumerate(body.values):
        tensor = value.content
        if isinstance(tensor, Tensor):
            if not (tensor.planned or tensor.stored or index in given) and 0 not in tensor.sizes:
                yield index
        elif value.kind == K.NULL and index in body.results and index not in body.inputs:
            yield index


def _check_chain(body: Body, chain: Sequence[PlanInstruction], waiting: dict[int, int], ready: int) -> int:
    """Check the instructions of a chain; return which values are made at its end, given those at its start."""
    states: list[int | None] = [None] * (len(chain) + 1)
    states[0], again = ready, True
    while again:
        again = False
        for position, instruction in enumerate(chain):
            state = states[position]
            if state is None:
                continue
            for index in _list_made(body, instruction):
                state |= waiting.get(index, 0)
            for following in (position + 1, instruction[1]) if instruction[0] == JUMP else (position + 1,):
                old = states[following]
                new = state if old is None else old & state
                if new != old:
                    states[following] = new
                    again = again or following <= position
    for state, instruction in zip(states, chain, strict=False):
        if state is not None:
            _check_read(body, instruction, waiting, state)
    end = states[len(chain)]
    return ready if end is None else end


def _list_made(body: Body, instruction: PlanInstruction) -> Collection[int]:
    """Return the values that are made by an instruction."""
    code, target, arguments = instruction
    if code == MOVE:
        return arguments[1:]
    if code == DELEGATE:
        return arguments
    if code != KERNEL:
        return ()
    called = body.signatures[target]
    if called is None:
        return arguments
    return arguments[2:3] if body.operators[target] == _VIEW else arguments[len(called.types) :]


def _check_read(body: Body, instruction: PlanInstruction, waiting: dict[int, int], ready: int) -> None:
    for index in _list_read(body, instruction):
        if index in waiting and not waiting[index] & ready:
            what = "has no memory" if isinstance(body.values[index].content, Tensor) else "is not made before"
            raise CorruptError(f"an instruction takes value {index}, which {what}")


def _list_read(body: Body, instruction: PlanInstruction) -> Iterator[int]:
    """Return the values that have to exist before an instruction."""
    code, target, arguments = instruction
    if code in (JUMP, FREE, MOVE):
        yield from arguments[:1] if code != FREE else ()
    elif code == DELEGATE:
        yield from (index for index in arguments if isinstance(body.values[index].content, Tensor))
    else:
        called = body.signatures[target]
        if called is None:
            return
        view = body.operators[target] == _VIEW
        for position, (index, allowed) in enumerate(zip(arguments, called.accepted, strict=False)):
            if not (view and position == 2) and not (body.values[index].kind == K.NULL and K.NULL in allowed):
                yield from body.items(index)


def _check_loops(body: Body, chain: Sequence[PlanInstruction]) -> None:
    """Refuse a loop without a jump that depends on what the loop makes: once entered, it is never left."""
    for position, (code, target, _) in enumerate(chain):
        if code == JUMP and target <= position:
            inside = chain[target : position + 1]
            made = {index for one in inside for index in (*_list_made(body, one), *_list_written(body, one))}
            if not any(kind == JUMP and made.intersection(arguments) for kind, _, arguments in inside):
                raise CorruptError(f"instruction {position} jumps back to {target} forever")


def _list_written(body: Body, instruction: PlanInstruction) -> Iterator[int]:
    """Return the tensors that a kernel writes."""
    code, target, arguments = instruction
    called = body.signatures[target] if code == KERNEL else None
    if called is not None:
        for position in called.written:
            yield from body.items(arguments[position])
