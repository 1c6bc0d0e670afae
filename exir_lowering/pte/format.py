"""What the methods of a `.pte` file take, call and return, checked before the runtime gets it.

The runtime ends the process on some of what a damaged file can hold. So everything that is an index, a size or a type
is checked, from the tables of the file alone; weights are not read, and what is inside a payload only its backend can
judge. What values are computed is not followed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

from exir_lowering.pte import payloads, provenance, signatures
from exir_lowering.pte.code import DELEGATE, JUMP, KERNEL, MOVE, Code, read_methods
from exir_lowering.pte.container import Data
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.kernel_signatures import signature
from exir_lowering.pte.payloads import PayloadContent, read_payload
from exir_lowering.pte.provenance import Dimension, MethodProvenance, Provenance
from exir_lowering.pte.signatures import MethodSignature
from exir_lowering.pte.slots import KernelTypes as K
from exir_lowering.pte.value_kinds import Allocation, MemoryLayout, Tensor, ValueSpec, check_index

SHARED = 2
"""The arena that methods share."""


@dataclass(frozen=True, slots=True)
class Delegation:
    """A part of a method that a backend executes."""

    number: int  # which of the method's delegates it is, from 0
    backend: str
    payload: int  # its size in bytes
    arguments: int  # how many values it is called with, inputs first
    outputs: tuple[ValueSpec, ...]  # the last of these values, which it may return
    counts: tuple[int, ...]  # how many of these it may return, the likeliest number first; one if the file says it


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """A method of a file."""

    name: str
    inputs: tuple[ValueSpec, ...]
    lost: frozenset[int]  # inputs that are None in the file but read as something else: integers dynamic at export
    operators: tuple[str, ...]  # the kernels it calls
    backends: tuple[str, ...]
    arenas: tuple[int, ...]  # the sizes of its planned memory
    # The weights that are in a data file: the layout of the tensor that each is, or how many bytes a backend reads.
    external: Mapping[str, MemoryLayout | int]
    delegations: tuple[Delegation, ...]  # in the order in which the runtime sets them up
    outputs: tuple[ValueSpec, ...]
    kernels: Mapping[int, str]  # the operator of each instruction that calls a kernel, such as "aten.add.out"
    called: Mapping[int, int]  # the delegate of each instruction that calls one
    signature: MethodSignature  # what it takes, returns and keeps; which state methods share is not in it
    state: tuple[int, ...]  # which values are state
    places: tuple[Allocation, ...]  # of these
    dimensions: tuple[Dimension, ...]  # what the file says of the sizes of its inputs


def read_program(file: memoryview) -> dict[str, MethodSpec]:
    """Read the methods of a `.pte` file from its tables, sorted; a CorruptError if the runtime may not be given it."""
    return {name: spec for name, (_, spec, _) in read_checked(file)[0].items()}


Checked: TypeAlias = tuple[Code, MethodSpec, tuple[PayloadContent | None, ...]]
"""A method's code, what was found about it, and what is in its payloads where that is known."""


def read_checked(file: memoryview) -> tuple[dict[str, Checked], Data]:
    """Read methods with their code, and the data; a CorruptError if they are damaged."""
    known, seen = list[Provenance](), dict[tuple[str, int], PayloadContent | None]()  # many delegates may share one

    def check(code: Code, data: Data) -> Checked:
        if not known:
            known.append(provenance.read(data.named) or Provenance())
        for payload in code.payloads:
            key = payload.backend, id(payload.content)
            if key not in seen:
                seen[key] = read_payload(payload.backend, payload.content)
        checked = tuple(seen[one.backend, id(one.content)] for one in code.payloads)
        made = known[0].methods.get(code.name, MethodProvenance())
        code = signatures.with_greatest(code, made)
        return code, _checked_method(code, checked, data, made), checked

    return read_methods(file, check)


def sharing(methods: Mapping[str, MethodSpec]) -> frozenset[str]:
    """Return the methods that share state: each has the same memory 2 for it, and none has a memory 3."""
    sizes = {name: method.arenas[SHARED] for name, method in methods.items() if len(method.arenas) == 3}
    one = len(set(sizes.values())) == 1 and all(len(method.arenas) <= 3 for method in methods.values())
    return frozenset(sizes) if one and len(sizes) > 1 and all(sizes.values()) else frozenset()


def program_signatures(methods: Mapping[str, MethodSpec]) -> Mapping[str, MethodSignature]:
    """Return the signatures of a file's methods, with the state that they share."""
    shared, users = sharing(methods), defaultdict[Allocation, list[str]](list)
    for name in sorted(shared):
        for place in methods[name].places:
            if place.arena == SHARED:
                users[place].append(name)
    found = {name: method.signature for name, method in methods.items()}
    for name in shared:
        state = zip(found[name].state, methods[name].places, strict=True)
        others = ((one, tuple(other for other in users[place] if other != name)) for one, place in state)
        found[name] = replace(found[name], state=tuple(replace(one, shared_with=names) for one, names in others))
    return MappingProxyType(found)


def _checked_method(
    code: Code, checked: Sequence[PayloadContent | None], data: Data, known: MethodProvenance
) -> MethodSpec:
    values, inputs = code.values, code.inputs
    for index in inputs:
        if isinstance(given := values[index].content, Tensor) and given.constant:
            raise CorruptError(f"value {index} is both an input and a constant")
    external: dict[str, MemoryLayout | int] = dict(code.external)
    for backend, one in {id(one): (of.backend, one) for of, one in zip(code.payloads, checked, strict=True)}.values():
        if one is not None:
            payloads.find_weights(backend, one, data, external)
    for size in known.dimensions:
        for index, dimension, _, _ in size.places:
            content = values[inputs[index]].content if index < len(inputs) else None
            if not isinstance(content, Tensor) or dimension >= len(content.sizes):
                raise CorruptError(f"its provenance names dimension {dimension} of input {index}, which is not there")
    made, read = _check_calls(code)
    lost = frozenset(place for place, index in enumerate(inputs) if values[index].kind == K.NULL and index in read)
    state = signatures.find_state(code, known)
    delegations = []
    for number, (arguments, counts) in enumerate(_list_delegates(code, state, known.results)):
        outputs = tuple(values[index] for index in arguments[len(arguments) - max(counts) :])
        payload = code.payloads[number]
        plain = number, payload.backend, len(payload.content), len(arguments)
        delegations.append(Delegation(*plain, outputs, counts))
    names = [".".join(filter(None, (*name.split("::", 1), overload))) for name, overload in code.operators]
    chain = code.chains[0] if len(code.chains) == 1 else ()  # of several, the instructions are numbered one by one
    return MethodSpec(
        code.name,
        tuple(values[index] for index in inputs),
        lost,
        tuple(sorted({f"{op}.{overload}" if overload else op for op, overload in code.operators})),
        tuple(sorted({payload.backend for payload in code.payloads})),
        code.arenas,
        dict(sorted(external.items())),
        tuple(delegations),
        tuple(values[index] for index in code.outputs),
        {number: names[target] for number, (kind, target, _) in enumerate(chain) if kind == KERNEL},
        {number: target for number, (kind, target, _) in enumerate(chain) if kind == DELEGATE},
        signatures.of_method(code, made, lost, state, known),
        tuple(state),
        tuple(state.values()),
        known.dimensions,
    )


def _check_calls(code: Code) -> tuple[set[int], set[int]]:
    """Check instructions, or raise a CorruptError; return the values that they return, and the None that they read."""
    if not code.chains:
        raise CorruptError("it has no chain of instructions")
    counts: Mapping[int, int] = {KERNEL: len(code.operators), DELEGATE: len(code.payloads)}
    for chain in code.chains:
        for kind, target, _ in chain:
            if kind in _TARGETS:
                check_index(target, counts.get(kind, len(chain) + 1), *_TARGETS[kind])
    kernels = [signature(*operator) for operator in code.operators]
    calls = [(*one, kernels[one[1]] if one[0] == KERNEL else None) for one in code.instructions()]
    made: set[int] = set()
    for kind, _, arguments, known in calls:
        if kind == MOVE:
            made.add(arguments[1])
        elif known is not None and not known.written:
            made.update(arguments[len(known.types) : len(known.types) + known.results])
        elif known is None and kind in (KERNEL, DELEGATE):
            made.update(index for index in arguments if code.values[index].kind == K.NULL)
    read: set[int] = set()
    for _, target, arguments, known in calls:
        for place, (index, type_) in enumerate(zip(arguments, known.types if known else (), strict=False)):
            items = code.items(index)
            if index not in items or not type_.startswith("Optional["):  # nobody can give it: the method never runs
                read.update(item for item in items if code.values[item].kind == K.NULL and item not in made)
            for item in items if known is not None and place in known.written else ():
                if isinstance(content := code.values[item].content, Tensor) and content.constant:
                    name = ".".join(filter(None, code.operators[target]))
                    raise CorruptError(f"{name} writes into value {item}, which is a constant")
    return made, read.intersection(code.inputs)


_TARGETS: Mapping[int, tuple[str, str]] = {
    KERNEL: ("a kernel call", "operators"),
    DELEGATE: ("a delegate call", "delegates"),
    JUMP: ("a jump", "instructions"),
}


def _list_delegates(
    code: Code, state: Collection[int], results: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return, for each delegate, the values that it is called with, and how many of the last may be results.

    Our files say that. Others have one rule: results are numbered consecutively, and no instruction named them before.
    A view, which no instruction makes, may be numbered before them; it is on memory that was named before.
    """
    calls: dict[int, tuple[int, ...]] = {}
    for kind, target, arguments in code.instructions():
        if kind == DELEGATE:
            calls.setdefault(target, arguments)
    numbers = range(len(code.payloads))
    if len(results) == len(numbers) and all(results[one] <= len(calls.get(one, ())) for one in numbers):
        return [(calls.get(one, ()), (results[one],)) for one in numbers]
    counts: dict[int, tuple[int, ...]] = {}
    seen = {*code.inputs, *state, *range(max(code.inputs, default=-1) + 1)}
    contents = enumerate(value.content for value in code.values)
    seen.update(index for index, tensor in contents if isinstance(tensor, Tensor) and tensor.stored)
    memory = set(map(code.place, seen)) - {None}
    for kind, target, arguments in code.instructions():
        if kind == DELEGATE and target not in counts:
            new = 0
            while new < len(arguments) and (index := arguments[-1 - new]) not in seen and index == arguments[-1] - new:
                new += 1
            after = (one for one in range(new - 1, 0, -1) if code.place(arguments[-1 - one]) in memory)
            counts[target] = new, *after
        named = {**dict.fromkeys(arguments), **code.items(*arguments)}
        seen.update(named)
        memory.update(set(map(code.place, named)) - {None})
    return [(calls.get(one, ()), counts.get(one, (0,))) for one in numbers]
