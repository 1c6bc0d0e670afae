"""What is done when a backend fails: find out on which operators, and lower without them, or in smaller pieces.

A partition that fails by itself is refused, and its operators go to the next partitioner or stay on the host; with
"split" it is first cut where the fewest bytes cross, again and again, until what fails is isolated. What is larger than
a backend said that partitions may be is cut before it is tried. Then everything that is left is put together again, and
stays together if the backend takes it. At the end each backend gets all of its partitions in one call, as always. If
that call fails, because they are too much together or because the backend fails now and then, what it made of each of
them by itself is taken.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.errors import BackendFailure, PartitionTooLargeError
from exir_lowering.graphs.measures import value_bytes
from exir_lowering.model import (
    BackendGroup,
    EdgeMethod,
    ExtractedMethod,
    LoweredPartition,
    Partition,
    RefusedPartition,
)
from exir_lowering.plans.lowering_plan import LoweringPlan
from exir_lowering.plugins.backend import Backend
from exir_lowering.steps.tag import Treatment

Mode = Literal["raise", "fallback", "split"]
_Place = tuple[str, str, str]
_Places = tuple[_Place, ...]  # a method, a backend, and an operator of the method
_Lower = Callable[[BackendGroup], list[LoweredPartition]]  # lowers a group, or raises a BackendFailure
_Recovered = tuple["Partitioned", list[LoweredPartition], tuple[RefusedPartition, ...]]
_LowerBy = Callable[[BackendGroup, Backend], list[LoweredPartition]]
_Partition = Callable[[Sequence[EdgeMethod], Treatment], "Partitioned"]
_Weights = Sequence[dict[Node, int]]  # the weights that each operator of a partition reads, with their bytes


@dataclass(frozen=True, slots=True)
class _Limits:
    """How large the partitions of a backend may be."""

    operators: float = math.inf
    bytes: float = math.inf  # of the weights that a partition reads

    def within(self, weights: _Weights, begin: int = 0) -> int:
        """Return the end of the longest stretch from `begin` on that is within the limits: one operator at least."""
        read: dict[Node, int] = {}
        total = 0
        for place in range(begin, len(weights)):
            total += sum(size for weight, size in weights[place].items() if weight not in read)
            read.update(weights[place])
            if place > begin and (place - begin >= self.operators or total > self.bytes):
                return place
        return len(weights)


@dataclass(frozen=True, slots=True)
class Partitioned:
    """Methods after their last extraction."""

    methods: tuple[EdgeMethod, ...]  # whose host operators run
    extracted: tuple[ExtractedMethod, ...]
    planned: LoweringPlan
    groups: tuple[BackendGroup, ...]
    backends: Mapping[str, Backend]  # of the groups, by id
    families: Mapping[str, str]  # the constant method that says which methods are one in several sizes or variants


def lower_groups(mode: Mode, found: Partitioned, partition: _Partition, lower: _LowerBy) -> _Recovered:
    """Lower each group in one call; where a backend fails and that is no error, partition again without that.

    Args:
        mode: `LoweringOptions.on_backend_error`.
        found: What is to be lowered.
        partition: Partitions methods, treating operators as a function says: see `retag`.
        lower: Lowers a group by its backend, or raises a BackendFailure.

    Returns:
        What was lowered in the end, the results for its groups, and what was refused on the way.
    """
    recovery = _Recovery(mode)

    def lower_group(group: BackendGroup) -> list[LoweredPartition]:
        return lower(group, found.backends[group.backend_id])

    while (results := recovery.lower(found.groups, lower_group)) is None:
        found = partition(found.methods, recovery.treatment)
    return found, results, tuple(recovery.refused)


class _Recovery:
    """What was learned from the failures of one lowering, and what is done about them."""

    def __init__(self, mode: Mode) -> None:
        self.refused: list[RefusedPartition] = []
        self._mode = mode
        self._begun = False
        self._numbers = itertools.count()
        self._limits: dict[str, _Limits] = defaultdict(_Limits)  # what backends said that partitions may have
        self._reasons: dict[_Place, str] = {}  # why a backend does not get an operator
        self._pieces: dict[_Place, int] = {}  # the number of the piece that an operator is in
        self._apart: dict[_Place, int] | None = None  # the pieces that work, when they have been put together again
        self._fine: dict[_Places, LoweredPartition] = {}  # what the backend made of partitions by themselves

    def lower(self, groups: Sequence[BackendGroup], lower: _Lower) -> list[LoweredPartition] | None:
        """Lower all groups, each in one call; None if what backends fail on has to be taken from them first."""
        if self._begun and self._learn(groups, lower):
            return None
        results: list[LoweredPartition] = []
        for group in groups:
            made = self._lower_group(group, groups, lower)
            if made is None:
                return None
            results += made
        return results

    def _lower_group(
        self, group: BackendGroup, groups: Sequence[BackendGroup], lower: _Lower
    ) -> list[LoweredPartition] | None:
        try:
            return lower(group)
        except BackendFailure as failure:
            if self._mode == "raise":
                raise
            self._note(group.backend_id, failure)
        begun, self._begun = self._begun, True
        if not begun and self._learn(groups, lower):
            return None
        return [replace(self._fine[_places(one)], partition=one) for one in group.partitions]

    def treatment(self, method: str, backend_id: str, node: str) -> str | int | None:
        """Return what is done with an operator that the backend is to get: see `retag`."""
        place = (method, backend_id, node)
        return self._reasons.get(place, self._pieces.get(place))

    def _learn(self, groups: Sequence[BackendGroup], lower: _Lower) -> bool:
        """Try each partition by itself that was not tried before; return whether the methods have to be cut again."""
        works = [self._works(partition, lower) for group in groups for partition in group.partitions]
        if not all(works) or self._apart is not None or not self._pieces:
            return not all(works)
        self._apart, self._pieces = self._pieces, {}
        return True

    def _works(self, partition: Partition, lower: _Lower) -> bool:
        """Return whether the backend lowers a partition by itself; one that it does not lower is cut, or refused."""
        places = _places(partition)
        if places in self._fine:
            return True
        weights, limits = _find_weights(partition), self._limits[partition.backend_id]
        if self._mode == "split" and limits.within(weights) < len(weights):
            self._cut(partition, places, weights)
            return False
        try:
            (self._fine[places],) = lower(BackendGroup(partition.backend_id, (partition,)))
        except BackendFailure as failure:
            self._note(partition.backend_id, failure)
            if self._mode == "split" and len(weights) > 1:
                self._cut(partition, places, weights)
            else:
                self._refuse(partition, places, weights, failure)
            return False
        return True

    def _note(self, backend_id: str, failure: BackendFailure) -> None:
        """Note how large partitions may be, if the backend says it; of what it says at different times, the least."""
        cause, known = failure.__cause__, self._limits[backend_id]
        if isinstance(cause, PartitionTooLargeError):
            size = math.inf if cause.bytes is None else cause.bytes
            self._limits[backend_id] = _Limits(
                min(known.operators, cause.operators or math.inf), min(known.bytes, size)
            )

    def _cut(self, partition: Partition, places: _Places, weights: _Weights) -> None:
        """Cut a partition: into the pieces that work, if it was put together of these, else into new ones."""
        apart = self._apart or {}
        known = {place: apart[place] for place in places if place in apart and place not in self._pieces}
        self._pieces.update(known)
        ends = [] if known else _find_ends(partition, weights, self._limits[partition.backend_id])
        for begin, end in itertools.pairwise(ends):
            self._pieces.update(dict.fromkeys(places[begin:end], next(self._numbers)))

    def _refuse(self, partition: Partition, places: _Places, weights: _Weights, failure: BackendFailure) -> None:
        backend_id = partition.backend_id
        reason = str(failure).partition("\n")[0].removeprefix(f"Backend {backend_id!r} failed: ")
        size = sum(dict(itertools.chain(*map(dict.items, weights))).values())
        if size > (limit := self._limits[backend_id].bytes):
            reason += f" (it reads {size:,} bytes of weights, and the limit is {limit:,})"
        self._reasons.update(dict.fromkeys(places, f"{backend_id!r} failed on it: {reason}"))
        lines = tuple(graphs.sources.lines_of(_operators(partition)))
        self.refused.append(RefusedPartition(partition.method, backend_id, partition.nodes, lines, str(failure)))


def _places(partition: Partition) -> _Places:
    return tuple((partition.method, partition.backend_id, name) for name in partition.nodes)


def _operators(partition: Partition) -> list[Node]:
    """Return the nodes that `partition.nodes` names, in that order."""
    return [node for node in partition.program.graph.nodes if graphs.is_operator(node)]


def _find_weights(partition: Partition) -> _Weights:
    """Return the parameters, buffers and constants that each operator reads; those of branches are operands too."""
    sizes = {node: value_bytes(node) for node in graphs.lifted_inputs(partition.program)}
    return [{read: sizes[read] for read in node.all_input_nodes if read in sizes} for node in _operators(partition)]


def _find_ends(partition: Partition, weights: _Weights, limits: _Limits) -> list[int]:
    """Return where a partition is cut, at the fewest bytes: late in what the limits allow, or in its middle half."""
    operators, count, ends = _operators(partition), len(weights), [0]
    places, changes = {node: place for place, node in enumerate(operators)}, [0] * (count + 2)
    for node, place in places.items():
        last = max((places.get(user, place) for user in _readers(node)), default=place)
        changes[place + 1] += value_bytes(node)
        changes[last + 1] -= value_bytes(node)
    crossing = list(itertools.accumulate(changes))
    if limits.within(weights) == count:
        middle = range(max(1, count // 4), max(2, count - count // 4))
        return [0, min(middle, key=lambda place: (crossing[place], abs(2 * place - count))), count]
    while ends[-1] < count:
        begin, end = ends[-1], limits.within(weights, ends[-1])
        latter = range(begin + (end - begin + 1) // 2, end + 1)
        ends.append(count if end == count else min(latter, key=lambda place: (crossing[place], -place)))
    return ends


def _readers(node: Node) -> Iterator[Node]:
    for user in node.users:
        yield from _readers(user) if graphs.is_getitem(user) else (user,)
