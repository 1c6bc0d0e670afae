"""What `.pte` and `.ptd` files say about themselves, checked before the runtime gets them.

The runtime ends the process on some of what a damaged file can hold: a kernel that finds an integer where its tensor
should be, or one argument too few. So everything that is an index, a size or a type is checked here, from the tables
of the file alone; weights and payloads are not read. What is inside a payload only its backend can judge.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from exir_lowering.pte import instructions, payloads, provenance, signatures
from exir_lowering.pte.code import Allocation, Code, Storage, read_methods
from exir_lowering.pte.container import Data
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.instructions import Body, check_calls
from exir_lowering.pte.kernel_signatures import signature
from exir_lowering.pte.payloads import FindChecks, PayloadMemory
from exir_lowering.pte.provenance import Provenance
from exir_lowering.pte.signatures import MethodSignature
from exir_lowering.pte.slots import KernelTypes as K
from exir_lowering.pte.value_kinds import MemoryLayout, Tensor, ValueSpec

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
    counts: tuple[int, ...]  # how many of these it returns, the likeliest number first: see `instructions`


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
    signature: MethodSignature  # what it takes, returns and keeps; which state methods share is not in it
    state: tuple[int, ...]  # which values are state
    places: tuple[Allocation, ...]  # of these


def read_program(file: memoryview, find_checks: FindChecks) -> dict[str, MethodSpec]:
    """Read the methods of a `.pte` file from its tables, sorted; a CorruptError if the runtime may not be given it."""
    return {name: spec for name, (_, spec) in read_checked(file, find_checks)[0].items()}


def read_checked(file: memoryview, find_checks: FindChecks) -> tuple[dict[str, tuple[Code, MethodSpec]], Data]:
    """Read methods with their code, and the data; a CorruptError if they are damaged."""
    known: list[Provenance | None] = []
    memory = PayloadMemory(find_checks)

    def check(code: Code, data: Data) -> tuple[Code, MethodSpec]:
        if not known:
            known.append(provenance.read(data.named))
        made = known[0].methods.get(code.name) if known[0] is not None else None
        return code, _checked_method(memory, code, data, made)

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
    memory: PayloadMemory, code: Code, data: Data, known: provenance.MethodProvenance | None
) -> MethodSpec:
    values, inputs = code.values, code.inputs
    for index in inputs:
        if isinstance(given := values[index].content, Tensor) and given.constant:
            raise CorruptError(f"value {index} is both an input and a constant")
    external: dict[str, MemoryLayout | int] = dict(code.external)
    checked = [memory.check(payload.backend, payload.content) for payload in code.payloads]
    for backend, one in {id(one): (of.backend, one) for of, one in zip(code.payloads, checked, strict=True)}.values():
        if one is not None:
            payloads.find_weights(backend, one, data, external)
    if not code.chains:
        raise CorruptError("it has no chain of instructions")
    schemas = [signature(*operator) for operator in code.operators]
    ends = frozenset(inputs), frozenset(code.outputs)
    body = Body(code.chains, values, code.operators, schemas, len(checked), *ends)
    read = check_calls(body)
    lost = {position for position, index in enumerate(inputs) if values[index].kind == K.NULL and index in read}
    state = signatures.find_state(code, body)
    return MethodSpec(
        code.name,
        tuple(values[index] for index in inputs),
        frozenset(lost),
        tuple(sorted({f"{op}.{overload}" if overload else op for op, overload in code.operators})),
        tuple(sorted({payload.backend for payload in code.payloads})),
        code.arenas,
        dict(sorted(external.items())),
        _delegations(code, body, state),
        tuple(values[index] for index in code.outputs),
        _kernels(code),
        signatures.of_method(code, body, frozenset(lost), state, known),
        tuple(state),
        tuple(state.values()),
    )


def _kernels(code: Code) -> Mapping[int, str]:
    """Return the operators of the instructions that call a kernel, as they are written in a model."""
    if len(code.chains) != 1:  # their instructions are numbered one by one
        return {}
    names = [".".join(filter(None, (*name.split("::", 1), overload))) for name, overload in code.operators]
    called = enumerate(code.chains[0])
    return {number: names[target] for number, (kind, target, _) in called if kind == instructions.KERNEL}


def _delegations(code: Code, body: Body, state: Collection[int]) -> tuple[Delegation, ...]:
    tensors = {number: value.content for number, value in enumerate(code.values) if isinstance(value.content, Tensor)}
    given = {number for number, tensor in tensors.items() if tensor.stored} | body.inputs | set(state)
    memory = [_memory(storage, value) for storage, value in zip(code.storage, code.values, strict=True)]
    calls = instructions.output_counts(code.chains, memory, body.items, given, max(code.inputs, default=-1))
    found = []
    for number, payload in enumerate(code.payloads):
        arguments, counts = calls.get(number, ((), (0,)))
        outputs = tuple(code.values[index] for index in arguments[len(arguments) - max(counts) :])
        size = len(payload.content)
        found.append(Delegation(number, payload.backend, size, len(arguments), outputs, counts))
    return tuple(found)


def _memory(storage: Storage | None, value: ValueSpec) -> tuple[Allocation, int, torch.dtype] | None:
    """Return the planned memory of a tensor, and the number and type of its elements; None for other values."""
    if storage is None or storage.planned is None or not isinstance(value.content, Tensor):
        return None
    return storage.planned, math.prod(value.content.sizes), value.content.dtype
