"""The container format of `.pte` and `.ptd` files: where the tables end, the segments, and the named data.

A header has its own length, so that versions of ExecuTorch can add fields. Old `.pte` files have no header, and no
segments. Numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from exir_lowering.pte import slots
from exir_lowering.pte.flatbuffer import CorruptError, Table, root
from exir_lowering.pte.kinds import PTD_MAGIC, PTE_MAGIC
from exir_lowering.pte.value_kinds import MemoryLayout, check_index, layout

_PTE_HEADER_MAGIC = b"eh00"
_PTD_HEADER_MAGIC = b"FH01"
_AT = 8
_PTE = struct.Struct("<4sIQQQ")  # magic, length, end of the tables, start of the segments, their size
_PTE_SHORT = 24  # the length of headers that lack the last field
_PTD = struct.Struct("<4sIQQQQ")  # magic, length, start of the tables, their size, start of the segments, their size


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the parts of a file are."""

    tables: int  # where they end
    base: int  # where the segments start; 0 when there are none
    space: int  # of the segments, in bytes


def read_pte(file: memoryview, whole: int | None = None) -> Extent:
    """Read a `.pte` file's header; `whole` says how many bytes it has. A CorruptError: it is none, or cut short."""
    available = len(file) if whole is None else whole
    if len(file) < 8:
        raise CorruptError(f"it has {len(file)} bytes")
    magic = bytes(file[4:8])
    if magic != PTE_MAGIC:
        raise CorruptError(f"its bytes 4 to 8 are {magic!r}, expected {PTE_MAGIC!r}")
    if len(file) < _AT + _PTE.size or bytes(file[8:12]) != _PTE_HEADER_MAGIC:
        return Extent(len(file), 0, 0)
    _, length, size, base, space = _PTE.unpack_from(file, _AT)
    if length < _PTE_SHORT:
        raise CorruptError(f"its header has {length} bytes, expected at least {_PTE_SHORT}")
    if length < _PTE.size or space == 0:
        space = max(available - base, 0)
    end = max(size, base + space) if base else size
    if end > available:
        raise CorruptError(
            f"its header says that there are {end} bytes, but the file has {available}; it may have been cut short"
        )
    if size < _AT + _PTE.size or (base and base < size):
        raise CorruptError(f"its header puts the segments at byte {base}, inside its {size} bytes of tables")
    return Extent(size, base, space if base else 0)


def size(file: memoryview) -> int:
    """Return how many bytes a file of either kind begins with that are neither tables nor segments."""
    if bytes(file[8:12]) not in (_PTE_HEADER_MAGIC, _PTD_HEADER_MAGIC):
        return _AT
    return _AT + int.from_bytes(file[12:16], "little")


def set_space(tables: bytearray, space: int) -> None:
    """Write the size of the segments into the header of a `.pte` file, in place; a CorruptError without a field."""
    magic, length, size, base, _ = _PTE.unpack_from(tables, _AT)
    if magic != _PTE_HEADER_MAGIC or length < _PTE.size:
        raise CorruptError("its header has no field for the size of its segments")
    _PTE.pack_into(tables, _AT, magic, length, size, base, space)


def read_ptd(file: memoryview) -> Extent:
    """Read the header of a `.ptd` file from its first bytes; a CorruptError when it is none, or was cut short."""
    if len(file) < _AT + _PTD.size:
        raise CorruptError(f"it has {len(file)} bytes")
    if bytes(file[4:8]) != PTD_MAGIC or bytes(file[8:12]) != _PTD_HEADER_MAGIC:
        raise CorruptError(
            f"it starts with {bytes(file[4:12])!r}, but a .ptd file has {PTD_MAGIC + _PTD_HEADER_MAGIC!r} there"
        )
    _, length, start, size, base, space = _PTD.unpack_from(file, _AT)
    if length < _PTD.size or start + size > len(file) or base + space > len(file):
        raise CorruptError(
            f"its header says that there are {max(start + size, base + space)} bytes, but the file has {len(file)}; "
            "it may have been cut short"
        )
    # Offsets in the tables count from the start of the file.
    return Extent(start + size, base, space)


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
    extent = read_pte(file)
    program = root(file[: extent.tables])
    ranges = list(segment_ranges(program.tables(slots.Program.SEGMENTS)))
    segments = _segments(ranges, file[extent.base : extent.base + extent.space])
    constants, named = program.table(slots.Program.CONSTANT_SEGMENT), list(program.tables(slots.Program.NAMED_DATA))
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
    extent = read_ptd(file)
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
