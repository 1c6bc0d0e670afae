"""The container format of `.pte` and `.ptd` files: where the tables end, the segments, and the named data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from exir_lowering.pte import header, slots
from exir_lowering.pte.flatbuffer import CorruptError, Table, root
from exir_lowering.pte.value_kinds import MemoryLayout, check_index, layout


@dataclass(frozen=True, slots=True)
class Data:
    """What the methods of a file may refer to."""

    segments: tuple[memoryview, ...]  # not copied
    named: Mapping[str, memoryview]
    constants: tuple[tuple[int, memoryview], ...]  # where each starts in its segment, and the segment
    initial: tuple[tuple[tuple[int, memoryview], ...], ...]  # the same for each list of mutable tensors
    inline_constants: tuple[memoryview, ...]  # in the tables of an old file
    inline_payloads: tuple[memoryview, ...]  # in the tables


@dataclass(frozen=True, slots=True)
class Weight:
    """Named data of a `.ptd` file."""

    content: memoryview  # not copied
    layout: MemoryLayout | None  # of the tensor that it is; None for what only a backend reads

    def fits(self, need: MemoryLayout | int) -> bool:
        """Return whether this is the tensor, or has the number of bytes, that a program needs."""
        if isinstance(need, MemoryLayout):
            return self.layout == need and len(self.content) >= need.size
        return len(self.content) >= need

    def __str__(self) -> str:
        return f"{len(self.content)} bytes" + (f" of {self.layout}" if self.layout is not None else "")


def open_program(file: memoryview) -> tuple[Table, Data]:
    """Return the root of a `.pte` file's tables, and what its methods may refer to; a CorruptError for another file."""
    extent = header.read_pte(file)
    program = root(file[: extent.tables])
    ranges = list(segment_ranges(program.tables(slots.Program.SEGMENTS)))
    segments = _segments(ranges, file[extent.base : extent.base + extent.space])
    constants, named = program.table(slots.Program.CONSTANT_SEGMENT), list(program.tables(slots.Program.NAMED_DATA))
    _check_overlaps(
        ranges,
        {table.number(slots.NamedData.SEGMENT_INDEX, "I") for table in named},
        constants.number(slots.SubsegmentOffsets.SEGMENT_INDEX, "I") if constants is not None else -1,
    )
    data = Data(
        segments,
        _read_named(named, segments),
        _offsets(constants, segments) if constants is not None else (),
        tuple(_offsets(table, segments) for table in program.tables(slots.Program.MUTABLE_DATA_SEGMENTS)),
        tuple(table.content(slots.ONLY) for table in program.tables(slots.Program.CONSTANT_BUFFER)),
        tuple(table.content(slots.ONLY) for table in program.tables(slots.Program.BACKEND_DELEGATE_DATA)),
    )
    return program, data


def read_data(file: memoryview) -> dict[str, Weight]:
    """Return the data in a `.ptd` file, which is not copied, by name; a CorruptError when it is not a valid one."""
    extent = header.read_ptd(file)
    table = root(file[: extent.tables])
    space = file[extent.base : extent.base + extent.space]
    segments = _segments(segment_ranges(table.tables(slots.FlatTensor.SEGMENTS)), space)
    entries = list(table.tables(slots.FlatTensor.NAMED_DATA))
    contents = _read_named(entries, segments)
    found = {}
    for entry in entries:
        name, tensor = entry.text(slots.NamedData.KEY), entry.table(slots.FlatNamedData.TENSOR_LAYOUT)
        found[name] = Weight(contents[name], None if tensor is None else layout(tensor, slots.TensorLayout))
    return found


def segment_ranges(tables: Iterable[Table]) -> Iterator[tuple[int, int]]:
    """Return where each segment of a file of either kind starts, relative to the first, and its size, as it says."""
    for table in tables:
        yield table.number(slots.DataSegment.OFFSET, "Q"), table.number(slots.DataSegment.SIZE, "Q")


def parts(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return where the parts of a file start, each up to the next one, and which is the outermost segment there."""
    found, end = [], 0
    for number in sorted(range(len(ranges)), key=lambda each: (ranges[each][0], ranges[each][1] > 0, -ranges[each][1])):
        start, size = ranges[number]
        if start >= end:
            found.append((start, number))
        end = max(end, start + size)
    return found


def _check_overlaps(ranges: Sequence[tuple[int, int]], named: Set[int], constants: int) -> None:
    """Check that segments overlap only where named data is among the constants, or inside other named data."""
    around, end = -1, 0
    holders = {*named, constants}
    for number in sorted(range(len(ranges)), key=lambda each: (ranges[each][0], -ranges[each][1], each in named)):
        start, size = ranges[number]
        if start >= end:
            around, end = number, start + size
        elif size and (start + size > end or number not in named or around not in holders):
            raise CorruptError(f"segment {number} has bytes of segment {around}")


def _segments(ranges: Iterable[tuple[int, int]], space: memoryview) -> tuple[memoryview, ...]:
    segments = []
    for number, (offset, size) in enumerate(ranges):
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
        name, index = table.text(slots.NamedData.KEY), table.number(slots.NamedData.SEGMENT_INDEX, "I")
        if not name:
            raise CorruptError("it has data without a name")
        check_index(index, len(segments), f"the data {name!r}", "segments")
        found[name] = segments[index]
    return found


def _offsets(table: Table, segments: Sequence[memoryview]) -> tuple[tuple[int, memoryview], ...]:
    offsets = table.numbers(slots.SubsegmentOffsets.OFFSETS, "Q")
    if not offsets:
        return ()
    index = table.number(slots.SubsegmentOffsets.SEGMENT_INDEX, "I")
    # A program whose only constant is the placeholder 0 has no segment for it.
    if offsets == (0,) and index >= len(segments):
        return ((0, memoryview(b"")),)
    check_index(index, len(segments), "a list of constants", "segments")
    return tuple((offset, segments[index]) for offset in offsets)
