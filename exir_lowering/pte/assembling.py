"""Change a `.pte` file that is complete: where its segments are, its digests, and what a module keeps in it.

ExecuTorch has no way to change tables that it has written, but numbers in them can be changed. So what is not known
when a file is emitted has a segment at its end, which is reserved: first what a module keeps, then the digests.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from exir_lowering.pte import container, digests, flatbuffer, header
from exir_lowering.pte.flatbuffer import CorruptError, Table
from exir_lowering.pte.slots import DataSegment, NamedData, Program

MODULE: Final = "exir_lowering.module"
"""The key of what a lowered module keeps among a file's named data."""

RESERVED: Final[Mapping[str, bytes]] = {MODULE: b"exir_lowering: reserved for a module"}
"""What is emitted in its place."""


def place_segments(tables: bytearray, places: Mapping[int, tuple[int, int]]) -> None:
    """Write where segments start and their sizes into the tables before them; a CorruptError where there is no field.

    Places count from the first segment. The last of all segments ends where the file does.
    """
    _, segments = _read(tables)
    for number, place in places.items():
        for field, value in zip((DataSegment.OFFSET, DataSegment.SIZE), place, strict=True):
            at = segments[number].place(field)
            if at is not None:
                struct.pack_into("<Q", tables, at, value)
            elif value:
                raise CorruptError(f"segment {number} has no field for the number {value}")
    header.set_space(tables, max(map(sum, container.segment_ranges(segments)), default=0))


def seal(
    tables: bytearray, content: Sequence[Any], data: Mapping[str, str], write: Callable[[Any, Any], object]
) -> list[Any]:
    """Return a file in pieces, with digests as its last segment, which follows the content; else raise a CorruptError.

    The tables come before the content; `data` are the digests of the data files, and `write` writes a piece to a file.
    """
    base, segments = _read(tables)
    ranges = list(container.segment_ranges(segments))
    starts = [start for start, _ in container.parts(ranges)]
    if not ranges or not base + ranges[-1][0] == base + starts[-1] == len(tables) + sum(map(len, content)):
        raise CorruptError("its digests are not what its segments end with")
    place_segments(tables, {len(ranges) - 1: (starts[-1], digests.size(len(starts) - 1, data))})
    made = digests.RangeDigests([base, *(base + start for start in starts[1:])])
    for piece in (bytes(tables), *content):
        write(piece, made)
    first, *rest = made.digests()
    return [bytes(tables), *content, digests.Seal(first, tuple(rest), data).encode()]


def with_module(file: memoryview, kept: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return a file in pieces that keeps something else for a module; a CorruptError when it has no place for that."""
    program, data = container.open_program(file)
    tables = bytearray(file[: header.read_pte(file).base])
    base, segments = _read(tables)
    last = len(segments) - 1
    numbers = {
        one.text(NamedData.KEY): one.number(NamedData.SEGMENT_INDEX, "I") for one in program.tables(Program.NAMED_DATA)
    }
    if (numbers.get(MODULE), numbers.get(digests.KEY)) != (last - 1, last):
        raise CorruptError("what a module keeps and the digests are not its last segments")
    *_, (start, _), (_, size) = container.segment_ranges(segments)
    try:
        old = digests.decode(data.named[digests.KEY])
    except digests.SealError as error:
        raise CorruptError(str(error)) from None
    if old.kind is not digests.XXH3:
        raise CorruptError("its digests are those of an earlier version")
    place_segments(tables, {last - 1: (start, sum(map(len, kept))), last: (start + sum(map(len, kept)), size)})
    return seal(tables, [file[base : base + start], *kept], old.data, lambda piece, made: made.write(piece))


def _read(tables: bytearray) -> tuple[int, list[Table]]:
    """Return where the segments start, and the tables that say where each of them is."""
    extent = header.read_pte(memoryview(tables), sys.maxsize)  # how many bytes follow is not known here
    return extent.base, list(flatbuffer.root(memoryview(tables)[: extent.tables]).tables(Program.SEGMENTS))
