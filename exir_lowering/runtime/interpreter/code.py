"""The code of a file's methods: values, instructions and payloads, as the interpreter executes them.

`format` has already checked the file; what is read here is in range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exir_lowering._upstream.runtime import compile_spec
from exir_lowering.pte import slots
from exir_lowering.pte.calls import read_instruction
from exir_lowering.pte.container import Data, open_program
from exir_lowering.pte.dataflow import PlanInstruction
from exir_lowering.pte.flatbuffer import Table
from exir_lowering.pte.slots import ExecutionPlan
from exir_lowering.pte.value_kinds import ValueSpec
from exir_lowering.pte.values import (
    Allocation,
    allocation,
    constant_index,
    external_name,
    read_value,
    stored_content,
    tensor_table,
)

if TYPE_CHECKING:
    from executorch.exir.backend.compile_spec_schema import CompileSpec


@dataclass(frozen=True, slots=True)
class Storage:
    """Where the content of a tensor is."""

    planned: Allocation | None  # None when it does not lie in planned memory
    content: memoryview | None  # in the file; the initial one when it lies in planned memory; None for none


@dataclass(frozen=True, slots=True)
class Payload:
    """A payload of a method, with the backend and what the partitioner told it."""

    backend: str
    content: memoryview
    specs: tuple[CompileSpec, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """The code of a method."""

    values: tuple[ValueSpec, ...]
    storage: tuple[Storage | None, ...]  # for each value where the content of the tensor is; None for no tensor
    inputs: tuple[int, ...]  # indices of values, as are the outputs
    outputs: tuple[int, ...]
    chains: tuple[tuple[PlanInstruction, ...], ...]
    operators: tuple[tuple[str, str], ...]  # of the instructions, each with its overload
    payloads: tuple[Payload, ...]  # what backends execute
    arenas: tuple[int, ...]  # the sizes of its planned memory


@dataclass(frozen=True, slots=True)
class Listing:
    """The code of a file."""

    methods: Mapping[str, Code]  # by name
    named: Mapping[str, memoryview]  # the named data in the file


def read_code(file: memoryview, external: Mapping[str, memoryview]) -> Listing:
    """Read the code of all methods of a `.pte` file, with the named data of its data file; nothing is copied."""
    program, data = open_program(file)
    named = {**external, **data.named}
    plans = program.tables(slots.Program.EXECUTION_PLAN)
    return Listing({plan.text(ExecutionPlan.NAME): _code(plan, data, named) for plan in plans}, data.named)


def _code(plan: Table, data: Data, named: Mapping[str, memoryview]) -> Code:
    arenas = plan.numbers(ExecutionPlan.NON_CONST_BUFFER_SIZES, "q")
    tables = list(plan.tables(ExecutionPlan.VALUES))
    values = tuple(read_value(number, table, arenas, data, {}) for number, table in enumerate(tables))
    tensors = map(tensor_table, tables)
    chains = [chain.tables(slots.Chain.INSTRUCTIONS) for chain in plan.tables(ExecutionPlan.CHAINS)]
    return Code(
        values,
        tuple(None if tensor is None else _storage(tensor, data, named) for tensor in tensors),
        plan.numbers(ExecutionPlan.INPUTS, "i"),
        plan.numbers(ExecutionPlan.OUTPUTS, "i"),
        tuple(tuple(read_instruction(table, len(values)) for table in chain) for chain in chains),
        tuple(map(_operator, plan.tables(ExecutionPlan.OPERATORS))),
        tuple(_payload(table, data) for table in plan.tables(ExecutionPlan.DELEGATES)),
        arenas,
    )


def _storage(tensor: Table, data: Data, named: Mapping[str, memoryview]) -> Storage:
    content, name = None, external_name(tensor)
    if name is not None:
        content = named[name]
    elif constant_index(tensor):
        start, segment = stored_content(tensor, data)
        content = segment[start:]
    return Storage(allocation(tensor), content)


def _operator(table: Table) -> tuple[str, str]:
    return table.text(slots.Operator.NAME), table.text(slots.Operator.OVERLOAD)


def _payload(delegate: Table, data: Data) -> Payload:
    reference = delegate.table(slots.BackendDelegate.PROCESSED)
    content = memoryview(b"")
    if reference is not None:
        index = reference.number(slots.BackendDelegateDataReference.INDEX, "I")
        location = reference.number(slots.BackendDelegateDataReference.LOCATION, "b")
        content = data.segments[index] if location == slots.DataLocation.SEGMENT else data.inline_payloads[index]
    specs = tuple(
        compile_spec(spec.text(slots.CompileSpec.KEY), bytes(spec.content(slots.CompileSpec.VALUE)))
        for spec in delegate.tables(slots.BackendDelegate.COMPILE_SPECS)
    )
    return Payload(delegate.text(slots.BackendDelegate.ID), content, specs)
