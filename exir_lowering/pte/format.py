"""What `.pte` and `.ptd` files say about themselves, checked before the runtime gets them.

The runtime ends the process on some of what a damaged file can hold: a kernel that finds an integer where its tensor
should be, or one argument too few. So everything that is an index, a size or a type is checked here, from the tables
of the file alone; weights and payloads are not read. What is inside a payload only its backend can judge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from exir_lowering.pte import dataflow, payloads, slots
from exir_lowering.pte.calls import Body, check_calls, read_instruction
from exir_lowering.pte.container import Data, open_program
from exir_lowering.pte.dataflow import PlanInstruction
from exir_lowering.pte.flatbuffer import CorruptError, Table
from exir_lowering.pte.flow import check_flow
from exir_lowering.pte.inference import check_kernels
from exir_lowering.pte.payloads import CheckedPayload, FindChecks
from exir_lowering.pte.signatures import signature
from exir_lowering.pte.slots import DataLocation, ExecutionPlan, KernelTypes as K
from exir_lowering.pte.value_kinds import MemoryLayout, Tensor, ValueSpec, check_index
from exir_lowering.pte.values import (
    Allocation,
    allocation,
    check_arenas,
    read_value,
    tensor_table,
)

_NEEDED: Mapping[int, str] = MappingProxyType(
    {
        ExecutionPlan.VALUES: "values",
        ExecutionPlan.INPUTS: "inputs",
        ExecutionPlan.OUTPUTS: "outputs",
        ExecutionPlan.CHAINS: "chains",
        ExecutionPlan.OPERATORS: "operators",
        ExecutionPlan.DELEGATES: "delegates",
        ExecutionPlan.NON_CONST_BUFFER_SIZES: "memory sizes",
    }
)
"""The fields of a method that the runtime reads without checking that they are present."""


@dataclass(frozen=True, slots=True)
class Delegation:
    """A part of a method that a backend executes."""

    number: int  # which of the method's delegates it is, from 0
    backend: str
    payload: int  # its size in bytes
    arguments: int  # how many values it is called with, inputs first
    outputs: tuple[ValueSpec, ...]  # the last of these values, which it may return
    counts: tuple[int, ...]  # how many of these it returns, the likeliest number first: see `dataflow`


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


@dataclass(frozen=True, slots=True)
class _Called:
    """What a delegate calls: a backend, with a payload of a size, which is checked where a plug-in knows it."""

    backend: str
    size: int
    payload: CheckedPayload | None


def read_program(file: memoryview, find_checks: FindChecks) -> dict[str, MethodSpec]:
    """Read the methods of a `.pte` file, in the order of names; it is neither copied nor read beyond its tables.

    Raise a CorruptError when it is not a `.pte` file, or not one that the runtime may be given.
    `exir_lowering.plugins.payload` has `find_checks`.
    """
    program, data = open_program(file)
    methods: dict[str, MethodSpec] = {}
    for plan in program.tables(slots.Program.EXECUTION_PLAN):
        method = _method(plan, data, find_checks)
        if method.name in methods:
            raise CorruptError(f"it has two methods {method.name!r}")
        methods[method.name] = method
    if not methods:
        raise CorruptError("it has no method")
    return {name: methods[name] for name in sorted(methods)}


def _method(plan: Table, data: Data, find_checks: FindChecks) -> MethodSpec:
    name = plan.text(ExecutionPlan.NAME)
    try:
        if not name:
            raise CorruptError("it has no name")
        return _checked_method(name, plan, data, find_checks)
    except CorruptError as error:
        raise CorruptError(f"method {name!r}: {error}") from None


def _checked_method(name: str, plan: Table, data: Data, find_checks: FindChecks) -> MethodSpec:
    missing = [what for field, what in _NEEDED.items() if not plan.has(field)]
    if missing:
        raise CorruptError(f"it has no list of {' or '.join(missing)}")
    arenas = plan.numbers(ExecutionPlan.NON_CONST_BUFFER_SIZES, "q")
    check_arenas(arenas)
    external: dict[str, MemoryLayout | int] = {}
    tables = list(plan.tables(ExecutionPlan.VALUES))
    values = [read_value(number, table, arenas, data, external) for number, table in enumerate(tables)]
    inputs, outputs = plan.numbers(ExecutionPlan.INPUTS, "i"), plan.numbers(ExecutionPlan.OUTPUTS, "i")
    for index in (*inputs, *outputs):
        check_index(index, len(values), "an input or output", "values")
    for index in inputs:
        if isinstance(given := values[index].content, Tensor) and given.constant:
            raise CorruptError(f"value {index} is both an input and a constant")
    operators = [_operator(table) for table in plan.tables(ExecutionPlan.OPERATORS)]
    backends = [_backend(table, data, external, find_checks) for table in plan.tables(ExecutionPlan.DELEGATES)]
    chains = [_chain(chain, len(values)) for chain in plan.tables(ExecutionPlan.CHAINS)]
    if not chains:
        raise CorruptError("it has no chain of instructions")
    signatures = [signature(*operator) for operator in operators]
    body = Body(chains, values, operators, signatures, len(backends), frozenset(inputs), frozenset(outputs))
    read = check_calls(body)
    check_flow(body)
    check_kernels(body)
    for code, target, arguments in body.instructions():
        payload = backends[target].payload if code == dataflow.DELEGATE else None
        if payload is not None:
            payloads.check_call(backends[target].backend, payload, [values[index] for index in arguments])
    lost = {position for position, index in enumerate(inputs) if values[index].kind == K.NULL and index in read}
    return MethodSpec(
        name,
        tuple(values[index] for index in inputs),
        frozenset(lost),
        tuple(sorted({f"{op}.{overload}" if overload else op for op, overload in operators})),
        tuple(sorted({called.backend for called in backends})),
        arenas,
        dict(sorted(external.items())),
        _delegations(backends, body, tables, inputs),
        tuple(values[index] for index in outputs),
        _kernels(chains, operators),
    )


def _operator(table: Table) -> tuple[str, str]:
    name, overload = slots.Operator.NAME, slots.Operator.OVERLOAD
    if not table.has(name) or not table.has(overload):
        raise CorruptError("an operator has no name, or no overload")
    return table.text(name), table.text(overload)


def _chain(table: Table, size: int) -> list[PlanInstruction]:
    if not table.has(slots.Chain.INSTRUCTIONS):
        raise CorruptError("a chain has no list of instructions")
    return [read_instruction(instruction, size) for instruction in table.tables(slots.Chain.INSTRUCTIONS)]


def _kernels(chains: Sequence[Sequence[PlanInstruction]], operators: Sequence[tuple[str, str]]) -> Mapping[int, str]:
    """Return the operators of the instructions that call a kernel, as they are written in a model."""
    if len(chains) != 1:  # their instructions are numbered one by one
        return {}
    return {
        number: ".".join(part for part in (*operators[target][0].split("::", 1), operators[target][1]) if part)
        for number, (code, target, _) in enumerate(chains[0])
        if code == dataflow.KERNEL
    }


def _delegations(
    backends: Sequence[_Called], body: Body, tables: Sequence[Table], inputs: Sequence[int]
) -> tuple[Delegation, ...]:
    tensors = {number: value.content for number, value in enumerate(body.values) if isinstance(value.content, Tensor)}
    given = {number for number, tensor in tensors.items() if tensor.stored} | set(inputs)
    if not inputs:
        # A buffer without initial values has no content in the file. It is numbered before the inputs; where there are
        # none, it is recognised as what an operator writes in place.
        given.update(
            arguments[0]
            for code, target, arguments in body.instructions()
            if code == dataflow.KERNEL and arguments and body.operators[target][0].endswith("_")
        )
    memory = [_memory(table, value) for table, value in zip(tables, body.values, strict=True)]
    calls = dataflow.output_counts(body.chains, memory, body.items, given, max(inputs, default=-1))
    found = []
    for number, called in enumerate(backends):
        arguments, counts = calls.get(number, ((), (0,)))
        outputs = tuple(body.values[index] for index in arguments[len(arguments) - max(counts) :])
        found.append(Delegation(number, called.backend, called.size, len(arguments), outputs, counts))
    return tuple(found)


def _memory(table: Table, value: ValueSpec) -> tuple[Allocation, int, torch.dtype] | None:
    """Return the planned memory of a tensor, and the number and type of its elements; None for other values."""
    tensor = tensor_table(table)
    planned = allocation(tensor) if tensor is not None else None
    if planned is None or not isinstance(value.content, Tensor):
        return None
    return planned, math.prod(value.content.sizes), value.content.dtype


def _backend(delegate: Table, data: Data, external: dict[str, MemoryLayout | int], find_checks: FindChecks) -> _Called:
    """Return what a delegate calls; add the weights that the file does not have."""
    backend, reference = delegate.text(slots.BackendDelegate.ID), delegate.table(slots.BackendDelegate.PROCESSED)
    if not backend or not delegate.has(slots.BackendDelegate.COMPILE_SPECS):
        raise CorruptError(f"a delegate has no backend, or no list of compile specs: {backend!r}")
    if reference is None:
        raise CorruptError(f"a delegate of {backend!r} has no payload")
    for spec in delegate.tables(slots.BackendDelegate.COMPILE_SPECS):
        if not spec.has(slots.CompileSpec.KEY) or not spec.has(slots.CompileSpec.VALUE):
            raise CorruptError(f"a compile spec of {backend!r} has no key, or no value")
        spec.text(slots.CompileSpec.KEY), spec.content(slots.CompileSpec.VALUE)
    location = reference.number(slots.BackendDelegateDataReference.LOCATION, "b")
    index = reference.number(slots.BackendDelegateDataReference.INDEX, "I")
    if location not in (DataLocation.INLINE, DataLocation.SEGMENT):
        raise CorruptError(f"a payload of {backend!r} has the unknown location {location}")
    contents = data.segments if location == DataLocation.SEGMENT else data.inline_payloads
    check_index(index, len(contents), f"a payload of {backend!r}", "payloads")
    checked = payloads.check_payload(backend, contents[index], find_checks)
    if checked is not None:
        payloads.find_weights(backend, checked, data, external)
    return _Called(backend, len(contents[index]), checked)
