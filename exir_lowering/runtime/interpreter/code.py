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
    """Where the content of a tensor is.

    Attributes:
        planned: Where it lies in planned memory, None when it does not.
        content: Its content in the file, or its initial content when it lies in planned memory; None for none.
    """

    planned: Allocation | None
    content: memoryview | None


@dataclass(frozen=True, slots=True)
class Payload:
    """A payload of a method, with the backend and what the partitioner told it."""

    backend: str
    content: memoryview
    specs: tuple[CompileSpec, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """The code of a method.

    Attributes:
        values: Its values.
        storage: For each value where the content of the tensor is; None for a value that is not a tensor.
        inputs: The values that are its inputs.
        outputs: The values that are its outputs.
        chains: Its instructions.
        operators: Their operators, each with its overload.
        payloads: What backends execute.
        arenas: The sizes of its planned memory.
    """

    values: tuple[ValueSpec, ...]
    storage: tuple[Storage | None, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    chains: tuple[tuple[PlanInstruction, ...], ...]
    operators: tuple[tuple[str, str], ...]
    payloads: tuple[Payload, ...]
    arenas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """The code of a file.

    Attributes:
        methods: The code of each method, by name.
        named: The named data in the file.
    """

    methods: Mapping[str, Code]
    named: Mapping[str, memoryview]


def read_code(file: memoryview, external: Mapping[str, memoryview]) -> Listing:
    """Read the code of all methods of a file.

    Args:
        file: The content of the `.pte` file; weights and payloads are not copied.
        external: The named data of its data file.

    Raises:
        CorruptError: The file has changed since it was checked.
    """
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
