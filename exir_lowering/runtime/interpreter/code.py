"""The code of a file's methods: values, instructions and payloads, as an engine of our own executes them.

`format` has checked the file before; what is read here is in range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exir_lowering._upstream.runtime import compile_spec
from exir_lowering.pte.calls import read_instruction
from exir_lowering.pte.container import Data, open_program
from exir_lowering.pte.dataflow import Instruction
from exir_lowering.pte.flatbuffer import Table
from exir_lowering.pte.value_kinds import TENSOR, Value
from exir_lowering.pte.values import read_value

if TYPE_CHECKING:
    from executorch.exir.backend.compile_spec_schema import CompileSpec


@dataclass(frozen=True, slots=True)
class Place:
    """Where the content of a tensor is.

    Attributes:
        arena: The number of the planned memory that it lies in, 0 for none.
        offset: The byte where it starts there.
        content: Its content in the file, or its initial content when it lies in planned memory; None for none.
    """

    arena: int
    offset: int
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
        places: For each value where the content of the tensor is, None for what is no tensor.
        inputs: The values that are its inputs.
        outputs: The values that are its outputs.
        chains: Its instructions.
        operators: Their operators, each with its overload.
        payloads: What backends execute.
        arenas: The sizes of its planned memory.
    """

    values: tuple[Value, ...]
    places: tuple[Place | None, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    chains: tuple[tuple[Instruction, ...], ...]
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
    methods = {plan.text(0): _code(plan, data, named) for plan in program.tables(1)}
    return Listing(methods, data.named)


def _code(plan: Table, data: Data, named: Mapping[str, memoryview]) -> Code:
    arenas = plan.numbers(8, "q")
    tables = list(plan.tables(2))
    values = tuple(read_value(number, table, arenas, data, {}) for number, table in enumerate(tables))
    contents = [table.table(1) for table in tables]
    return Code(
        values,
        tuple(
            _place(content, data, named) if value.kind == TENSOR and content is not None else None
            for value, content in zip(values, contents, strict=True)
        ),
        plan.numbers(3, "i"),
        plan.numbers(4, "i"),
        tuple(tuple(read_instruction(table, len(values)) for table in chain.tables(2)) for chain in plan.tables(5)),
        tuple((table.text(0), table.text(1)) for table in plan.tables(6)),
        tuple(_payload(table, data) for table in plan.tables(7)),
        arenas,
    )


def _place(tensor: Table, data: Data, named: Mapping[str, memoryview]) -> Place:
    place, extra, index = tensor.table(6), tensor.table(9), tensor.number(5, "I")
    arena = offset = 0
    if place is not None:
        arena, low, high = (place.number(field, "I") for field in range(3))
        offset = low + (high << 32)
    content = None
    if extra is not None and extra.number(2, "b") == 1:
        content = named[extra.text(1)]
    elif index and place is None and data.inline_constants:
        content = data.inline_constants[index]
    elif index:
        offsets = data.constants if place is None else data.initial[extra.number(0, "Q") if extra is not None else 0]
        start, segment = offsets[index]
        content = segment[start:]
    return Place(arena, offset, content)


def _payload(delegate: Table, data: Data) -> Payload:
    reference = delegate.table(1)
    content = memoryview(b"")
    if reference is not None:
        index = reference.number(1, "I")
        content = data.segments[index] if reference.number(0, "b") else data.inline_payloads[index]
    specs = tuple(compile_spec(spec.text(0), bytes(spec.content(1))) for spec in delegate.tables(2))
    return Payload(delegate.text(0), content, specs)
