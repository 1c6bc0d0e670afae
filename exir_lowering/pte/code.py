"""The code of a file's methods, read from their tables: values, instructions and payloads.

What is read refers to nothing that does not exist; `format` checks what it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from exir_lowering.pte import slots
from exir_lowering.pte.container import Data, open_program
from exir_lowering.pte.flatbuffer import CorruptError, Table
from exir_lowering.pte.instructions import PlanInstruction, read_instruction
from exir_lowering.pte.slots import DataLocation, ExecutionPlan
from exir_lowering.pte.value_kinds import MemoryLayout, ValueSpec, check_index
from exir_lowering.pte.values import Storage, read_value

_Made = TypeVar("_Made")

_NEEDED: Mapping[int, str] = {
    ExecutionPlan.VALUES: "values",
    ExecutionPlan.INPUTS: "inputs",
    ExecutionPlan.OUTPUTS: "outputs",
    ExecutionPlan.CHAINS: "chains",
    ExecutionPlan.OPERATORS: "operators",
    ExecutionPlan.DELEGATES: "delegates",
    ExecutionPlan.NON_CONST_BUFFER_SIZES: "memory sizes",
}
"""The fields of a method that the runtime reads without checking that they are present."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A payload of a method, with the backend and its compile specs."""

    backend: str
    content: memoryview
    specs: tuple[tuple[str, bytes], ...]  # keys and values


@dataclass(frozen=True, slots=True)
class Code:
    """The code of a method."""

    name: str
    values: tuple[ValueSpec, ...]
    storage: tuple[Storage | None, ...]  # for each value where the content of the tensor is; None for no tensor
    inputs: tuple[int, ...]  # indices of values, as are the outputs
    outputs: tuple[int, ...]
    chains: tuple[tuple[PlanInstruction, ...], ...]
    operators: tuple[tuple[str, str], ...]  # of the instructions, each with its overload
    payloads: tuple[Payload, ...]  # what backends execute
    arenas: tuple[int, ...]  # the sizes of its planned memory
    external: Mapping[str, MemoryLayout]  # what tensors in data files have to be, by name


def read_code(file: memoryview) -> tuple[dict[str, Code], Data]:
    """Return the code of all methods of a `.pte` file, by name, and what it refers to; nothing is copied."""
    return read_methods(file, lambda code, data: code)


def read_methods(file: memoryview, make: Callable[[Code, Data], _Made]) -> tuple[dict[str, _Made], Data]:
    """Return what a function makes of each method's code, by name, and the data; a CorruptError if it is damaged."""
    program, data = open_program(file)
    made: dict[str, _Made] = {}
    for plan in program.tables(slots.Program.EXECUTION_PLAN):
        name = plan.text(ExecutionPlan.NAME)
        try:
            if not name:
                raise CorruptError("it has no name")
            one = make(_read(name, plan, data), data)
        except CorruptError as error:
            raise CorruptError(f"method {name!r}: {error}") from None
        if name in made:
            raise CorruptError(f"it has two methods {name!r}")
        made[name] = one
    if not made:
        raise CorruptError("it has no method")
    return {name: made[name] for name in sorted(made)}, data


def _read(name: str, plan: Table, data: Data) -> Code:
    missing = [what for field, what in _NEEDED.items() if not plan.has(field)]
    if missing:
        raise CorruptError(f"it has no list of {' or '.join(missing)}")
    arenas = plan.numbers(ExecutionPlan.NON_CONST_BUFFER_SIZES, "q")
    if any(size < 0 for size in arenas):
        raise CorruptError(f"its planned memory has the sizes {list(arenas)}")
    external: dict[str, MemoryLayout] = {}
    tables = enumerate(plan.tables(ExecutionPlan.VALUES))
    values = [read_value(number, table, arenas, data, external) for number, table in tables]
    inputs, outputs = plan.numbers(ExecutionPlan.INPUTS, "i"), plan.numbers(ExecutionPlan.OUTPUTS, "i")
    for index in (*inputs, *outputs):
        check_index(index, len(values), "an input or output", "values")
    operators = tuple(map(_operator, plan.tables(ExecutionPlan.OPERATORS)))
    payloads = tuple(_payload(table, data) for table in plan.tables(ExecutionPlan.DELEGATES))
    chains = tuple(_chain(table, len(values)) for table in plan.tables(ExecutionPlan.CHAINS))
    specs, storage = tuple(value for value, _ in values), tuple(stored for _, stored in values)
    return Code(name, specs, storage, inputs, outputs, chains, operators, payloads, arenas, external)


def _operator(table: Table) -> tuple[str, str]:
    name, overload = slots.Operator.NAME, slots.Operator.OVERLOAD
    if not table.has(name) or not table.has(overload):
        raise CorruptError("an operator has no name, or no overload")
    return table.text(name), table.text(overload)


def _payload(delegate: Table, data: Data) -> Payload:
    backend, reference = delegate.text(slots.BackendDelegate.ID), delegate.table(slots.BackendDelegate.PROCESSED)
    if not backend or not delegate.has(slots.BackendDelegate.COMPILE_SPECS):
        raise CorruptError(f"a delegate has no backend, or no list of compile specs: {backend!r}")
    if reference is None:
        raise CorruptError(f"a delegate of {backend!r} has no payload")
    specs = []
    for spec in delegate.tables(slots.BackendDelegate.COMPILE_SPECS):
        if not spec.has(slots.CompileSpec.KEY) or not spec.has(slots.CompileSpec.VALUE):
            raise CorruptError(f"a compile spec of {backend!r} has no key, or no value")
        specs.append((spec.text(slots.CompileSpec.KEY), bytes(spec.content(slots.CompileSpec.VALUE))))
    location = reference.number(slots.BackendDelegateDataReference.LOCATION, "b")
    index = reference.number(slots.BackendDelegateDataReference.INDEX, "I")
    if location not in (DataLocation.INLINE, DataLocation.SEGMENT):
        raise CorruptError(f"a payload of {backend!r} has the unknown location {location}")
    contents = data.segments if location == DataLocation.SEGMENT else data.inline_payloads
    check_index(index, len(contents), f"a payload of {backend!r}", "payloads")
    return Payload(backend, contents[index], tuple(specs))


def _chain(table: Table, size: int) -> tuple[PlanInstruction, ...]:
    if not table.has(slots.Chain.INSTRUCTIONS):
        raise CorruptError("a chain has no list of instructions")
    return tuple(read_instruction(instruction, size) for instruction in table.tables(slots.Chain.INSTRUCTIONS))
