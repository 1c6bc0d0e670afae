"""The container format of `.pte` and `.ptd` files: where the tables end, the segments, and the named data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from exir_lowering.pte import data_slots, header
from exir_lowering.pte.flatbuffer import CorruptError, Table, root
from exir_lowering.pte.slots import (
    BackendDelegateInlineData,
    Buffer,
    DataSegment,
    NamedData,
    Program,
    SubsegmentOffsets,
)
from exir_lowering.pte.value_kinds import MemoryLayout, check_index, layout


@dataclass(frozen=True, slots=True)
class Data:
    """What the methods of a file may refer to.

    Attributes:
        segments: The segments, not copied.
        named: The segments that have a name.
        constants: Where each constant starts in its segment, and the segment.
        initial: The same for the initial values of each list of mutable tensors.
        inline_constants: The constants that an old file holds in its tables.
        inline_payloads: The payloads that are in the tables.
    """

    segments: tuple[memoryview, ...]
    named: Mapping[str, memoryview]
    constants: tuple[tuple[int, memoryview], ...]
    initial: tuple[tuple[tuple[int, memoryview], ...], ...]
    inline_constants: tuple[memoryview, ...]
    inline_payloads: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """Named data of a `.ptd` file.

    Attributes:
        content: The data, not copied.
        layout: The layout of the tensor that it is; None for what only a backend reads.
    """

    content: memoryview
    layout: MemoryLayout | None

    def fits(self, need: MemoryLayout | int) -> bool:
        """Return whether this is the tensor, or has the number of bytes, that a program needs."""
        if isinstance(need, MemoryLayout):
            return self.layout == need and len(self.content) >= need.size
        return len(self.content) >= need

    def __str__(self) -> str:
        return f"{len(self.content)} bytes" + (f" of {self.layout}" if self.layout is not None else "")


def open_program(file: memoryview) -> tuple[Table, Data]:
    """Return the root of a `.pte` file's tables, and what its methods may refer to.

    Args:
        file: The file's content, which is not copied.

    Raises:
        CorruptError: The file is not a `.pte` file.
    """
    extent = header.read_pte(file)
    program = root(file[: extent.tables])
    segments = _segments(program.tables(Program.SEGMENTS), file[extent.base : extent.base + extent.space])
    constants = program.table(Program.CONSTANT_SEGMENT)
    data = Data(
        segments,
        _read_named(program.tables(Program.NAMED_DATA), segments),
        _offsets(constants, segments) if constants is not None else (),
        tuple(_offsets(table, segments) for table in program.tables(Program.MUTABLE_DATA_SEGMENTS)),
        tuple(table.content(Buffer.STORAGE) for table in program.tables(Program.CONSTANT_BUFFER)),
        tuple(table.content(BackendDelegateInlineData.DATA) for table in program.tables(Program.BACKEND_DELEGATE_DATA)),
    )
    return program, data


def read_data(file: memoryview) -> dict[str, Weight]:
    """Find the data in a `.ptd` file, by name.

    Args:
        file: The file's content, which is neither copied nor read beyond its tables.

    Raises:
        CorruptError: The file is not a valid `.ptd` file.
    """
    extent = header.read_ptd(file)
    table = root(file[: extent.tables])
    space = file[extent.base : extent.base + extent.space]
    segments = _segments(table.tables(data_slots.FlatTensor.SEGMENTS), space)
    entries = list(table.tables(data_slots.FlatTensor.NAMED_DATA))
    contents = _read_named(entries, segments)
    named = ((entry.text(NamedData.KEY), entry) for entry in entries)
    return {name: Weight(contents[name], _layout(entry)) for name, entry in named}


def segment_ranges(tables: Iterable[Table]) -> Iterator[tuple[int, int]]:
    """Return where each segment starts, relative to the first one, and its size, as a file says.

    Args:
        tables: The tables of the segments, of a `.pte` or a `.ptd` file: both have the same fields.
    """
    for table in tables:
        yield table.number(DataSegment.OFFSET, "Q"), table.number(DataSegment.SIZE, "Q")


def _layout(entry: Table) -> MemoryLayout | None:
    """Return the layout of the tensor that named data of a `.ptd` file is; None when it is not a tensor."""
    table = entry.table(data_slots.NamedData.TENSOR_LAYOUT)
    if table is None:
        return None
    slots = data_slots.TensorLayout
    return layout(table, slots.SCALAR_TYPE, slots.SIZES, slots.DIM_ORDER)


def _segments(tables: Iterable[Table], space: memoryview) -> tuple[memoryview, ...]:
    segments = []
    for number, (offset, size) in enumerate(segment_ranges(tables)):
        if offset + size > len(space):
            raise CorruptError(
                f"segment {number} ends at byte {offset + size} of the segments, which have {len(space)} bytes; "
                "the file may have been cut short"
            )
        segments.append(space[offset : offset + size])
    return tuple(segments)


def _read_named(tables: Iterable[Table], segments: Sequence[memoryview]) -> dict[str, memoryview]:
    found = {}
    for table in tables:
        name, index = table.text(NamedData.KEY), table.number(NamedData.SEGMENT_INDEX, "I")
        if not name:
            raise CorruptError("it has data without a name")
        check_index(index, len(segments), f"the data {name!r}", "segments")
        found[name] = segments[index]
    return found


def _offsets(table: Table, segments: Sequence[memoryview]) -> tuple[tuple[int, memoryview], ...]:
    offsets = table.numbers(SubsegmentOffsets.OFFSETS, "Q")
    if not offsets:
        return ()
    index = table.number(SubsegmentOffsets.SEGMENT_INDEX, "I")
    # A program whose only constant is the placeholder 0 has no segment for it.
    if offsets == (0,) and index >= len(segments):
        return ((0, memoryview(b"")),)
    check_index(index, len(segments), "a list of constants", "segments")
    return tuple((offset, segments[index]) for offset in offsets)
