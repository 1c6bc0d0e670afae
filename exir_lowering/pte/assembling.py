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
    ends, made, at = [base, *(base + start for start in starts[1:])], [digests.Hash()], 0
    for piece in (bytes(tables), *content):
        while len(piece) and len(made) < len(ends) and at == ends[len(made) - 1]:
            made.append(digests.Hash())
        write(piece, made[-1])
        at += len(piece)
        if at > ends[len(made) - 1]:
            raise CorruptError("its pieces are not its segments")
    first, *rest = (one.digest() for one in [*made, *(digests.Hash() for _ in ends[len(made) :])])
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
    old = digests.decode(data.named[digests.KEY])
    place_segments(tables, {last - 1: (start, sum(map(len, kept))), last: (start + sum(map(len, kept)), size)})
    cuts = sorted(begin for begin, _ in container.parts(ranges) if begin <= start)
    before = (file[base + begin : base + end] for begin, end in itertools.pairwise(cuts))
    return seal(tables, [*before, *kept], old.data, lambda piece, made: made.write(piece))


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


def share(pieces: Sequence[Any], alignments: Mapping[str, int], segment: int, constant: int) -> list[Any] | None:
    """Return a file without delegates' copies of constants, None if it has none.

    `alignments` are those that delegates ask for, by the keys of named data; the others those of the file.
    """
    tables, program, ranges, by_start = _open(pieces)
    constants = program.table(Program.CONSTANT_SEGMENT)
    index = constants.number(SubsegmentOffsets.SEGMENT_INDEX, "I") if constants is not None else len(ranges)
    ends = [0, *(start + size for start, size in ranges)]
    if constants is None or index >= len(ranges) or any(s < e for (s, _), e in zip(ranges, ends, strict=False)):
        return None  # there are no constants, or segments overlap already
    offsets = constants.numbers(SubsegmentOffsets.OFFSETS, "Q")
    vector = constants.place(SubsegmentOffsets.OFFSETS)
    first, whole = ranges[index]
    by_size: dict[int, list[int]] = defaultdict(list)
    for offset in dict.fromkeys(offsets):
        if offset < whole:
            by_size[len(by_start[first + offset])].append(offset)
    alignment_of: dict[int, int] = defaultdict(lambda: 1)
    for table in program.tables(Program.NAMED_DATA):
        number = table.number(NamedData.SEGMENT_INDEX, "I")
        alignment_of[number] = math.lcm(alignment_of[number], alignments.get(table.text(NamedData.KEY), 1))
    aligned, shared = dict.fromkeys(offsets, constant), dict[int, int]()  # by segment the constant that it equals
    for number, alignment in alignment_of.items():
        start, size = ranges[number]
        equal = (offset for offset in by_size.get(size, ()) if size and by_start.get(start) == by_start[first + offset])
        for offset in itertools.islice(equal, 1):
            shared[number] = offset
            aligned[offset] = math.lcm(aligned[offset], segment, alignment)
    if not shared:
        return None
    content: list[Any] = []
    end = 0

    def add(added: Iterable[Any], alignment: int) -> int:
        """Add pieces at a place of an alignment, and return it."""
        nonlocal end
        start = end + -end % alignment
        for piece in (bytes(start - end), *added):
            if len(piece):
                content.append(piece)
                end += len(piece)
        return start

    places, made, moved = sorted(by_start), dict[int, tuple[int, int]](), dict[int, int]()
    for number, (start, size) in enumerate(ranges):
        if number == index:
            begin = add((), math.lcm(segment, *aligned.values()))
            for offset in sorted(aligned):
                moved[offset] = add([by_start[start + offset] if offset < size else b""], aligned[offset]) - begin
            made[number] = begin, end - begin
        elif number not in shared:
            within = places[bisect_left(places, start) : bisect_left(places, start + size)]
            alignment = math.lcm(segment, alignment_of.get(number, 1))
            made[number] = add((by_start[place] for place in within), alignment), size
    made.update({number: (made[index][0] + moved[offset], ranges[number][1]) for number, offset in shared.items()})
    place_segments(tables, made)
    if vector is None:
        raise CorruptError("the constants have no offsets")
    (at,) = struct.unpack_from("<I", tables, vector)
    struct.pack_into(f"<{len(offsets)}Q", tables, vector + at + 4, *(moved[offset] for offset in offsets))
    return [bytes(tables), *content]
