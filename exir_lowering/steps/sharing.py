"""One weight, once: named data that is also a constant of the host points at the constant's bytes.

ExecuTorch gives each named datum a segment of its own, and all constants one segment together. The runtime reads a
segment by its place and its size, so two may overlap: the datum's own copy is removed, and the constant moves to where
the delegate's alignment holds.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executorch.exir import ExecutorchBackendConfig, ExecutorchProgramManager
from executorch.exir.tensor import ALIGNMENT

from exir_lowering._upstream.emission import cord_pieces, named_data_alignments, pte_contents, set_cord_pieces
from exir_lowering.errors import InvariantError
from exir_lowering.pte import assembling, flatbuffer, header
from exir_lowering.pte.container import segment_ranges
from exir_lowering.pte.flatbuffer import CorruptError, Table
from exir_lowering.pte.slots import NamedData, Program, SubsegmentOffsets


@dataclass(frozen=True, slots=True)
class _Layout:
    """A `.pte` file as ExecuTorch assembled it."""

    tables: bytearray  # what comes before the segments
    program: Table  # the root of the tables
    ranges: list[tuple[int, int]]  # where each segment starts, relative to the first one, and its size
    pieces: Mapping[int, Any]  # the content from a place on, by the place; places count from the first segment
    constants: int  # which segment has them
    offsets: tuple[int, ...]  # where in it each constant starts
    alignments: Mapping[int, int]  # what the users of a segment ask for, by its number


def share(manager: ExecutorchProgramManager, config: ExecutorchBackendConfig) -> None:
    """Remove the copies of constants that delegates have as named data from the `.pte` file that was emitted.

    Raise InvariantError if the file is not laid out as ExecuTorch does it.
    """
    cord = pte_contents(manager)
    layout = _read(cord_pieces(cord), named_data_alignments(manager))
    shared = _find(layout) if layout is not None else {}
    if layout is None or not shared:
        return
    aligned = config.constant_tensor_alignment or ALIGNMENT
    content = _rewrite(layout, shared, config.segment_alignment, aligned)
    set_cord_pieces(cord, [bytes(layout.tables), *content])


def _read(pieces: list[Any], alignments: Mapping[str, int]) -> _Layout | None:
    """Return the layout of a file; None when it has no constants, or its segments overlap already."""
    whole = sum(map(len, pieces))
    extent = header.read_pte(memoryview(pieces[0]), whole)
    tables = bytearray(pieces[0].ljust(extent.base, b"\0"))
    program = flatbuffer.root(memoryview(tables)[: extent.tables])
    ranges = list(segment_ranges(program.tables(Program.SEGMENTS)))
    constants = program.table(Program.CONSTANT_SEGMENT)
    index = constants.number(SubsegmentOffsets.SEGMENT_INDEX, "I") if constants is not None else len(ranges)
    ends = [0, *(start + size for start, size in ranges)]
    if constants is None or index >= len(ranges) or any(s < e for (s, _), e in zip(ranges, ends, strict=False)):
        return None
    places, at = {}, -extent.base
    for piece in pieces:
        if len(piece):
            places[at] = piece
        at += len(piece)
    asked: dict[int, int] = defaultdict(lambda: 1)
    for table in program.tables(Program.NAMED_DATA):
        number = table.number(NamedData.SEGMENT_INDEX, "I")
        asked[number] = math.lcm(asked[number], alignments.get(table.text(NamedData.KEY), 1))
    offsets = constants.numbers(SubsegmentOffsets.OFFSETS, "Q")
    return _Layout(tables, program, ranges, places, index, offsets, asked)


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

    def align(self, alignment: int) -> int:
        """Fill up to a place of an alignment, and return it."""
        self._add(bytes(-self.end % alignment))
        return self.end

    def add(self, pieces: Iterable[Any], alignment: int) -> int:
        """Add pieces at a place of an alignment, and return it."""
        start = self.align(alignment)
        for piece in pieces:
            self._add(piece)
        return start

    def _add(self, piece: Any) -> None:
        if len(piece):
            self.pieces.append(piece)
            self.end += len(piece)


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
            first = content.align(math.lcm(segment_alignment, *aligned.values()))
            for offset in sorted(aligned):
                piece = layout.pieces[start + offset] if offset < size else b""
                moved[offset] = content.add([piece], aligned[offset]) - first
            ranges[number] = first, content.end - first
        elif number not in shared:
            within = places[bisect_left(places, start) : bisect_left(places, start + size)]
            asked = math.lcm(segment_alignment, layout.alignments.get(number, 1))
            ranges[number] = content.add((layout.pieces[place] for place in within), asked), size
    first, _ = ranges[layout.constants]
    for number, offset in shared.items():
        ranges[number] = first + moved[offset], layout.ranges[number][1]
    _set_places(layout, ranges, [moved[offset] for offset in layout.offsets])
    return content.pieces


def _set_places(layout: _Layout, ranges: Mapping[int, tuple[int, int]], constants: Sequence[int]) -> None:
    """Write where the segments are, and the constants in theirs, into the tables."""
    try:
        assembling.place_segments(layout.tables, ranges)
    except CorruptError as error:
        raise InvariantError(f"Weights cannot be shared: {error}.") from None
    offsets = layout.program.table(Program.CONSTANT_SEGMENT)
    at = offsets.place(SubsegmentOffsets.OFFSETS) if offsets is not None else None
    if at is None:
        raise InvariantError("Weights cannot be shared: the constants have no offsets.")
    (vector,) = struct.unpack_from("<I", layout.tables, at)
    struct.pack_into(f"<{len(constants)}Q", layout.tables, at + vector + 4, *constants)
