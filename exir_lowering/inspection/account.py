"""An account of the bytes of a file: each of them once, and what it is."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from exir_lowering.inspection.report import ByteRange


def place(file: memoryview, part: memoryview) -> int | None:
    """Return where in a file a part of it starts; None for a part without bytes."""
    if not len(part):
        return None
    return _address(part) - _address(file)


def _address(content: memoryview) -> int:
    return int(np.frombuffer(content, np.uint8).__array_interface__["data"][0])


def cover(size: int, parts: Iterable[ByteRange]) -> tuple[ByteRange, ...]:
    """Return ranges that cover all bytes of a file, in order.

    A byte in several parts belongs to the last of these; one in none is padding before the last part, and the rest
    after it.
    """
    given = [part for part in parts if part.size]
    end = max((part.start + part.size for part in given), default=0)
    outside = [ByteRange(0, end, "padding"), ByteRange(end, size - end, "rest")]
    found: list[ByteRange] = []
    for start, stop, part in _pieces([one for one in outside if one.size] + given):
        last = found[-1] if found else None
        if last is not None and (last.kind, last.what) == (part.kind, part.what):
            found[-1] = ByteRange(last.start, stop - last.start, last.kind, last.what)
        else:
            found.append(ByteRange(start, stop - start, part.kind, part.what))
    return tuple(found)


def _pieces(parts: list[ByteRange]) -> Iterator[tuple[int, int, ByteRange]]:
    """Yield, in order, from where to where which of the parts is on top: the last of those that are there."""
    starts = sorted(range(len(parts)), key=lambda number: parts[number].start)
    edges = sorted({edge for part in parts for edge in (part.start, part.start + part.size)})
    on_top: list[int] = []
    begun = 0
    for start, stop in itertools.pairwise(edges):
        while begun < len(starts) and parts[starts[begun]].start <= start:
            heapq.heappush(on_top, -starts[begun])
            begun += 1
        while parts[-on_top[0]].start + parts[-on_top[0]].size <= start:
            heapq.heappop(on_top)
        yield start, stop, parts[-on_top[0]]
