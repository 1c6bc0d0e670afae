"""What is done when a backend fails: find out on which operators, and lower without them, or in smaller pieces.

A partition that fails by itself is refused, and its operators go to the next partitioner or stay on the host; with
"split" it is first cut where the fewest bytes cross, again and again, until what fails is isolated. Then everything
that is left is put together again, and stays together if the backend takes it. At the end each backend gets all of its
partitions in one call, as always.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.errors import BackendFailure, PartitionTooLargeError
from exir_lowering.graphs.measures import value_bytes
from exir_lowering.model import BackendGroup, Partition, RefusedPartition

_Place = tuple[str, str, str]
"""A method, a backend, and an operator of the method."""

_Lower = Callable[[BackendGroup], object]
"""Lowers a group, or raises a BackendFailure."""


class Recovery:
    """What was learned from the failures of one lowering, and what is done about them."""

    def __init__(self, mode: Literal["raise", "fallback", "split"]) -> None:
        self.refused: list[RefusedPartition] = []
        self._mode = mode
        self._begun = False
        self._numbers = itertools.count()
        self._reasons: dict[_Place, str] = {}  # why a backend does not get an operator
        self._pieces: dict[_Place, int] = {}  # the number of the piece that an operator is in
        self._apart: dict[_Place, int] | None = None  # the pieces that work, when they have been put together again
        self._fine: set[tuple[str, str, tuple[str, ...]]] = set()  # partitions that the backend lowers by themselves

    def begin(self) -> bool:
        """Begin to look for what fails; return False if nothing is to be done, or it was looked for already."""
        begun, self._begun = self._begun, self._mode != "raise"
        return self._begun and not begun

    @property
    def knows(self) -> bool:
        """Whether anything was learned that tags have to say."""
        return bool(self._reasons or self._pieces)

    def treatment(self, method: str, backend_id: str, node: str) -> str | int | None:
        """Return what is done with an operator that the backend is to get: see `retag`."""
        place = (method, backend_id, node)
        return self._reasons.get(place, self._pieces.get(place))

    def learn(self, groups: Sequence[BackendGroup], lower: _Lower) -> bool:
        """Try each partition by itself that was not tried before; return whether the methods have to be cut anew."""
        if not self._begun:
            return False
        failed = [
            (partition, failure)
            for group in groups
            for partition in group.partitions
            if (failure := self._try(partition, lower)) is not None
        ]
        for partition, failure in failed:
            self._treat(partition, failure)
        if failed or self._apart is not None or not self._pieces:
            return bool(failed)
        self._apart, self._pieces = self._pieces, {}
        return True

    def _try(self, partition: Partition, lower: _Lower) -> BackendFailure | None:
        key = (partition.method, partition.backend_id, partition.nodes)
        if key not in self._fine:
            try:
                lower(BackendGroup(partition.backend_id, (partition,)))
            except BackendFailure as failure:
                return failure
            self._fine.add(key)
        return None

    def _treat(self, partition: Partition, failure: BackendFailure) -> None:
        """Refuse a partition that failed, or cut it."""
        places = [(partition.method, partition.backend_id, name) for name in partition.nodes]
        apart = self._apart or {}
        known = {place: apart[place] for place in places if place in apart and place not in self._pieces}
        if known:
            self._pieces.update(known)
        elif self._mode == "split" and len(places) > 1:
            for piece in _cut(partition, failure):
                number = next(self._numbers)
                self._pieces.update(dict.fromkeys(places[piece], number))
        else:
            reason = str(failure.__cause__ or failure).partition("\n")[0]
            self._reasons.update(dict.fromkeys(places, f"{partition.backend_id!r} failed on it: {reason}"))
            lines = tuple(dict.fromkeys(filter(None, map(graphs.source_line, _operators(partition)))))
            about = (partition.method, partition.backend_id, partition.nodes, lines, str(failure))
            self.refused.append(RefusedPartition(*about))


def _operators(partition: Partition) -> list[Node]:
    """Return the nodes that `partition.nodes` names, in that order."""
    return [node for node in partition.program.graph.nodes if graphs.is_operator(node)]


def _cut(partition: Partition, failure: BackendFailure) -> Iterator[slice]:
    """Yield the pieces that a partition is cut into: those that the backend asked for, or else two."""
    count, cause = len(partition.nodes), failure.__cause__
    if isinstance(cause, PartitionTooLargeError) and cause.operators < count:
        pieces = -(-count // cause.operators)
        ends = [count * number // pieces for number in range(pieces + 1)]
    else:
        ends = [0, _smallest_cut(_operators(partition)), count]
    yield from itertools.starmap(slice, itertools.pairwise(ends))


def _smallest_cut(operators: Sequence[Node]) -> int:
    """Return how many operators are before the place in the middle half where the fewest bytes cross."""
    count = len(operators)
    places = {node: place for place, node in enumerate(operators)}
    crossing = [0] * (count + 1)
    for node, place in places.items():
        last = max((places.get(user, place) for user in _readers(node)), default=place)
        for between in range(place + 1, last + 1):
            crossing[between] += value_bytes(node)
    middle = range(max(1, count // 4), max(2, count - count // 4))
    return min(middle, key=lambda place: (crossing[place], abs(2 * place - count)))


def _readers(node: Node) -> Iterator[Node]:
    for user in node.users:
        yield from _readers(user) if graphs.is_getitem(user) else (user,)
