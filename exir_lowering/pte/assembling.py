"""Change a `.pte` file that is complete: where its segments are, its digests, and what a module keeps in it.

ExecuTorch has no way to change tables that it has written, but numbers in them can be changed. So what is not known
when a file is emitted has a segment at its end, which is reserved: first the provenance, then what a module keeps, then
the digests.

One weight is there once: named data that is also a constant of the host points at the constant's bytes. ExecuTorch
gives each named datum a separate segment, and all constants one segment together. The runtime reads a segment by its
place and its size, so two may overlap: the datum's own copy is removed, and the constant moves to where the delegate's
alignment holds.
"""

from __future__ import annotations

import itertools
import math
import struct
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from exir_lowering.pte import container, digests, flatbuffer
from exir_lowering.pte.flatbuffer import CorruptError, Table
from exir_lowering.pte.slots import DataSegment, NamedData, Program, SubsegmentOffsets

MODULE: Final = "exir_lowering.module"
"""The key of what a lowered module keeps among a file's named data."""

RESERVED: Final[Mapping[str, bytes]] = {MODULE: b"exir_lowering: reserved for a module"}
"""What is emitted in its place."""


def place_segments(tables: bytearray, places: Mapping[int, tuple[int, int]]) -> None:
    """Write where segments start, from the first one, and their sizes into the tables, or raise a CorruptError."""
    segments = list(_read(tables)[1].tables(Program.SEGMENTS))
    for number, place in places.items():
        for field, value in zip((DataSegment.OFFSET, DataSegment.SIZE), place, strict=True):
            at = segments[number].place(field)
            if at is not None:
                struct.pack_into("<Q", tables, at, value)
            elif value:
                raise CorruptError(f"segment {number} has no field for the number {value}")
    container.set_space(tables, max(map(sum, container.segment_ranges(segments)), default=0))


def seal(
    tables: bytearray, content: Sequence[Any], data: Mapping[str, str], write: Callable[[Any, Any], object]
) -> list[Any]:
    """Return a file in pieces with digests (`data`: of data files) as its last segment; `write` writes a piece."""
    base, _, ranges = _read(tables)
    starts = [start for start, _ in container.parts(ranges)]
    if not ranges or not base + ranges[-1][0] == base + starts[-1] == len(tables) + sum(map(len, content)):
        raise CorruptError("its digests are not what its segments end with")
    place_segments(tables, {len(ranges) - 1: (starts[-1], digests.size(len(starts) - 1, data))})
    made = digests.RangeDigests([base, *(base + start for start in starts[1:])])
    for piece in (bytes(tables), *content):
        write(piece, made)
    first, *rest = made.digests()
    return [bytes(tables), *content, digests.Seal(first, tuple(rest), data).encode()]


def fill(pieces: Sequence[Any], key: str, content: bytes) -> list[Any]:
    """Return a file in pieces with other named data under a key; what follows it moves. CorruptError without it."""
    tables, program, ranges, by_start = _open(pieces)
    named = program.tables(Program.NAMED_DATA)
    numbers = [one.number(NamedData.SEGMENT_INDEX, "I") for one in named if one.text(NamedData.KEY) == key]
    first = numbers[0] if numbers else len(ranges)
    behind: list[Any] = [by_start.get(start, b"") for start, _ in ranges[first:]]
    if not behind or [len(piece) for piece in behind] != [size for _, size in ranges[first:]]:
        raise CorruptError(f"there is no place for {key!r}")
    start, _ = ranges[first]
    places, made = {}, [content, *behind[1:]]
    for number, piece in enumerate(made, first):
        places[number] = start, len(piece)
        start += len(piece)
    place_segments(tables, places)
    before = [piece for at, piece in by_start.items() if 0 <= at < ranges[first][0]]
    return [bytes(tables), *before, *made]


def with_module(file: memoryview, kept: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return a file in pieces that keeps something else for a module; a CorruptError when it has no place for that."""
    program, data = container.open_program(file)
    tables = bytearray(file[: container.read_pte(file).base])
    base, _, ranges = _read(tables)
    last = len(ranges) - 1
    numbers = {
        one.text(NamedData.KEY): one.number(NamedData.SEGMENT_INDEX, "I") for one in program.tables(Program.NAMED_DATA)
    }
    if (numbers.get(MODULE), numbers.get(digests.KEY)) != (last - 1, last):
        raise CorruptError("a module's attributes and the digests are not its last segments")
    *_, (start, _), (_, size) = ranges
    try:
        old = digests.decode(data.named[digests.KEY])
    except digests.SealError as error:
        raise CorruptError(str(error)) from None
    if old.kind is not digests.XXH3:
        raise CorruptError("its digests are those of an earlier version")
    place_segments(tables, {last - 1: (start, sum(map(len, kept))), last: (start + sum(map(len, kept)), size)})
    return seal(tables, [file[base : base + start], *kept], old.data, lambda piece, made: made.write(piece))


def _read(tables: bytearray) -> tuple[int, Table, list[tuple[int, int]]]:
    """Return where the segments start, the root of the tables, and where they say that each segment is."""
    extent = container.read_pte(memoryview(tables), sys.maxsize)  # how many bytes follow is not known here
    program = flatbuffer.root(memoryview(tables)[: extent.tables])
    return extent.base, program, list(container.segment_ranges(program.tables(Program.SEGMENTS)))


def _open(pieces: Sequence[Any]) -> tuple[bytearray, Table, list[tuple[int, int]], dict[int, Any]]:
    """Return a file's tables, their root, where its segments are, and its pieces by where they start."""
    base = container.read_pte(memoryview(pieces[0]), sum(map(len, pieces))).base
    tables = bytearray(pieces[0].ljust(base, b"\0"))
    _, program, ranges = _read(tables)
    starts = itertools.accumulate(map(len, pieces), initial=-base)
    return tables, program, ranges, {at: piece for at, piece in zip(starts, pieces, strict=False) if len(piece)}


@dataclass(frozen=True, slots=True)
class _Layout:
    """A `.pte` file as ExecuTorch assembled it."""

    tables: bytearray  # what comes before the segments
    ranges: list[tuple[int, int]]  # where each segment starts, relative to the first one, and its size
    pieces: Mapping[int, Any]  # the content from a place on, by the place; places count from the first segment
    constants: int  # which segment has them
    offsets: tuple[int, ...]  # where in it each constant starts
    vector: int | None  # where in the tables that is written
    alignments: Mapping[int, int]  # what the users of a segment ask for, by its number


def share(pieces: Sequence[Any], alignments: Mapping[str, int], segment: int, constant: int) -> list[Any] | None:
    """Return a file without delegates' copies of constants, None if it has none; `alignments` are of named data."""
    layout = _read_layout(pieces, alignments)
    shared = _find(layout) if layout is not None else {}
    if layout is None or not shared:
        return None
    content = _rewrite(layout, shared, segment, constant)
    return [bytes(layout.tables), *content]


def _read_layout(pieces: Sequence[Any], alignments: Mapping[str, int]) -> _Layout | None:
    """Return the layout of a file; None when it has no constants, or its segments overlap already."""
    tables, program, ranges, by_start = _open(pieces)
    constants = program.table(Program.CONSTANT_SEGMENT)
    index = constants.number(SubsegmentOffsets.SEGMENT_INDEX, "I") if constants is not None else len(ranges)
    ends = [0, *(start + size for start, size in ranges)]
    if constants is None or index >= len(ranges) or any(s < e for (s, _), e in zip(ranges, ends, strict=False)):
        return None
    alignment_of: dict[int, int] = defaultdict(lambda: 1)
    for table in program.tables(Program.NAMED_DATA):
        number = table.number(NamedData.SEGMENT_INDEX, "I")
        alignment_of[number] = math.lcm(alignment_of[number], alignments.get(table.text(NamedData.KEY), 1))
    of = SubsegmentOffsets.OFFSETS
    return _Layout(tables, ranges, by_start, index, constants.numbers(of, "Q"), constants.place(of), alignment_of)


def _find(layout: _Layout) -> dict[int, int]:
    """Return, for each segment of named data that equals a constant, where among the constants that is."""
    start, whole = layout.ranges[layout.constants]
    by_size: dict[int, list[int]] = defaultdict(list)
    for offset in dict.fromkeys(layout.offsets):
        if offset < whole:
            by_size[len(layout.pieces[start + offset])].append(offset)
    found = {}
    for number in layout.alignments:
        place, size = layout.ranges[number]
        for offset in by_size.get(size, ()) if size else ():
            if layout.pieces.get(place) == layout.pieces[start + offset]:
                found[number] = offset
                break
    return found


class _Content:
    """The content of the segments, under construction."""

    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self.end = 0

    def add(self, pieces: Iterable[Any], alignment: int) -> int:
        """Add pieces at a place of an alignment, and return it."""
        start = self.end + -self.end % alignment
        for piece in (bytes(start - self.end), *pieces):
            if len(piece):
                self.pieces.append(piece)
                self.end += len(piece)
        return start


def _rewrite(layout: _Layout, shared: Mapping[int, int], segment_alignment: int, alignment: int) -> list[Any]:
    """Return the content of the segments without the copies, and make the tables say where they are."""
    aligned = dict.fromkeys(layout.offsets, alignment)
    for number, offset in shared.items():
        aligned[offset] = math.lcm(aligned[offset], segment_alignment, layout.alignments[number])
    content, moved = _Content(), {}
    ranges: dict[int, tuple[int, int]] = {}
    places = sorted(layout.pieces)
    for number, (start, size) in enumerate(layout.ranges):
        if number == layout.constants:
            first = content.add((), math.lcm(segment_alignment, *aligned.values()))
            for offset in sorted(aligned):
                piece = layout.pieces[start + offset] if offset < size else b""
                moved[offset] = content.add([piece], aligned[offset]) - first
            ranges[number] = first, content.end - first
        elif number not in shared:
            within = places[bisect_left(places, start) : bisect_left(places, start + size)]
            alignment = math.lcm(segment_alignment, layout.alignments.get(number, 1))
            ranges[number] = content.add((layout.pieces[place] for place in within), alignment), size
    first, _ = ranges[layout.constants]
    for number, offset in shared.items():
        ranges[number] = first + moved[offset], layout.ranges[number][1]
    place_segments(layout.tables, ranges)
    if layout.vector is None:
        raise CorruptError("the constants have no offsets")
    (vector,) = struct.unpack_from("<I", layout.tables, layout.vector)
    constants = [moved[offset] for offset in layout.offsets]
    struct.pack_into(f"<{len(constants)}Q", layout.tables, layout.vector + vector + 4, *constants)
    return content.pieces
