"""The peak of a planned memory: how much of it is in use at most, and by what."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar


class Placed(Protocol):
    """A tensor in planned memory: where, and from which to which time."""

    @property
    def offset(self) -> int:
        """The byte where it starts."""

    @property
    def bytes(self) -> int:
        """Its size."""

    @property
    def first(self) -> int:
        """The first time at which it is in use."""

    @property
    def last(self) -> int:
        """The last one."""


P = TypeVar("P", bound=Placed)


def find_peak(tensors: Sequence[P]) -> tuple[int, int, list[P]]:
    """Return the most bytes in use at once, the first time at which they are, and what uses them, the largest first."""
    memory = _Covered(edge for tensor in tensors for edge in (tensor.offset, tensor.offset + tensor.bytes))
    peak, at = 0, 0
    ending = sorted(tensors, key=lambda tensor: tensor.last)
    ended = 0
    for time, begun in itertools.groupby(sorted(tensors, key=lambda tensor: tensor.first), lambda tensor: tensor.first):
        while ended < len(ending) and ending[ended].last < time:
            memory.add(ending[ended], -1)
            ended += 1
        for tensor in begun:
            memory.add(tensor, 1)
        if memory.bytes > peak:
            peak, at = memory.bytes, time
    most = [tensor for tensor in tensors if tensor.first <= at <= tensor.last] if peak else []
    return peak, at, sorted(most, key=lambda tensor: -tensor.bytes)


class _Covered:
    """How many bytes tensors take together, as views have the memory of others: a segment tree over their ends."""

    def __init__(self, edges: Iterable[int]) -> None:
        self._edges = sorted(set(edges)) or [0]
        self._places = {edge: place for place, edge in enumerate(self._edges)}
        self._width = 1 << (len(self._edges) - 1).bit_length()
        self._covers = [0] * (2 * self._width)  # how many tensors cover a segment whole, and not the one above it
        self._bytes = [0] * (2 * self._width)

    @property
    def bytes(self) -> int:
        return self._bytes[1]

    def add(self, tensor: Placed, count: int) -> None:
        """Add a tensor, or take it away."""
        left = self._places[tensor.offset] + self._width
        right = self._places[tensor.offset + tensor.bytes] + self._width
        first, last = left, right - 1
        while left < right:
            if left & 1:
                self._cover(left, count)
                left += 1
            if right & 1:
                right -= 1
                self._cover(right, count)
            left, right = left // 2, right // 2
        for leaf in (first, last):
            while leaf := leaf // 2:
                self._cover(leaf, 0)

    def _cover(self, segment: int, count: int) -> None:
        self._covers[segment] += count
        if self._covers[segment]:
            self._bytes[segment] = self._length(segment)
        else:
            leaf = segment >= self._width
            self._bytes[segment] = 0 if leaf else self._bytes[2 * segment] + self._bytes[2 * segment + 1]

    def _length(self, segment: int) -> int:
        level = self._width.bit_length() - segment.bit_length()
        begin, end = (((segment + more) << level) - self._width for more in (0, 1))
        last = len(self._edges) - 1
        return self._edges[min(end, last)] - self._edges[min(begin, last)]
