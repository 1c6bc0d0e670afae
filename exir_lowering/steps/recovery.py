"""What is done when a backend fails: find out on which operators, and lower without them, or in smaller pieces.

A partition that fails by itself is refused, or with "split" first cut in two, again and again. What is left is put
together again. At the end each backend gets all of its partitions in one call, as always; if that fails, what it made
of each of them by itself is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from exir_lowering import graphs
from exir_lowering.errors import BackendFailure
from exir_lowering.model import BackendGroup, EdgeMethod, ExtractedMethod, LoweredPartition, Partition, RefusedPartition
from exir_lowering.plans.lowering_plan import LoweringPlan
from exir_lowering.plugins.backend import Backend
from exir_lowering.steps.tag import Treatment

Mode = Literal["raise", "fallback", "split"] | None
_Place = tuple[str, str, str]  # a method, a backend, and an operator of the method
_Recovered = tuple["Partitioned", list[LoweredPartition], tuple[RefusedPartition, ...]]
_Lower = Callable[[BackendGroup, Backend], list[LoweredPartition]]
_Partition = Callable[[Sequence[EdgeMethod], Treatment], "Partitioned"]


@dataclass(frozen=True, slots=True)
class Partitioned:
    """Methods after their last extraction."""

    methods: tuple[EdgeMethod, ...]  # whose host operators run
    extracted: tuple[ExtractedMethod, ...]
    planned: LoweringPlan
    groups: tuple[BackendGroup, ...]
    backends: Mapping[str, Backend]  # of the groups, by id
    families: Mapping[str, str]  # the constant method that says which methods are one in several sizes or variants


def lower_groups(mode: Mode, found: Partitioned, partition: _Partition, lower: _Lower) -> _Recovered:
    """Lower each group in one call; where a backend fails and that is no error, partition again without that.

    Returned are what was lowered in the end, the results for its groups, and what was refused on the way.
    """
    recovery = _Recovery(mode, lower)
    while (results := recovery.lower(found)) is None:
        found = partition(found.methods, recovery.treatment)
    return found, results, tuple(recovery.refused)


class _Recovery:
    """What was learned from the failures of one lowering, and what is done about them."""

    def __init__(self, mode: Mode, lower: _Lower) -> None:
        self.refused: list[RefusedPartition] = []
        self._mode, self._lower = mode, lower
        self._begun = False
        self._numbers = itertools.count()
        self._reasons: dict[_Place, str] = {}  # why a backend does not get an operator
        self._pieces: dict[_Place, int] = {}  # the number of the piece that an operator is in
        self._apart: dict[_Place, int] | None = None  # the pieces that work, when they have been put together again
        self._fine: dict[tuple[_Place, ...], LoweredPartition] = {}  # what the backend made of partitions by themselves

    def lower(self, found: Partitioned) -> list[LoweredPartition] | None:
        """Lower all groups, each in one call; None if what backends fail on has to be taken from them first."""
        if self._begun and self._learn(found):
            return None
        results: list[LoweredPartition] = []
        for group in found.groups:
            try:
                results += self._lower(group, found.backends[group.backend_id])
            except BackendFailure:
                if self._mode in (None, "raise"):
                    raise
                begun, self._begun = self._begun, True
                if not begun and self._learn(found):
                    return None
                results += [replace(self._fine[_places(one)], partition=one) for one in group.partitions]
        return results

    def treatment(self, method: str, backend_id: str, node: str) -> str | int | None:
        """Return what is done with an operator that the backend is to get: see `retag`."""
        place = (method, backend_id, node)
        return self._reasons.get(place, self._pieces.get(place))

    def _learn(self, found: Partitioned) -> bool:
        """Try each partition by itself that was not tried before; return whether the methods have to be cut again."""
        tried = [self._try(one, found.backends[group.backend_id]) for group in found.groups for one in group.partitions]
        if not all(tried) or self._apart is not None or not self._pieces:
            return not all(tried)
        self._apart, self._pieces = self._pieces, {}
        return True

    def _try(self, partition: Partition, backend: Backend) -> bool:
        """Return whether the backend lowers a partition by itself; one that it does not lower is cut, or refused."""
        places, backend_id = _places(partition), partition.backend_id
        if places in self._fine:
            return True
        try:
            (self._fine[places],) = self._lower(BackendGroup(backend_id, (partition,)), backend)
            return True
        except BackendFailure as failure:
            text = str(failure)
        if self._mode == "split" and len(places) > 1:  # into the pieces that work, if it was put together of these
            apart = self._apart or {}
            known = {place: apart[place] for place in places if place in apart and place not in self._pieces}
            for half in () if known else (places[: len(places) // 2], places[len(places) // 2 :]):
                known.update(dict.fromkeys(half, next(self._numbers)))
            self._pieces.update(known)
        else:
            reason = text.partition("\n")[0].removeprefix(f"Backend {backend_id!r} failed: ")
            self._reasons.update(dict.fromkeys(places, f"{backend_id!r} failed on it: {reason}"))
            nodes = filter(graphs.is_operator, partition.program.graph.nodes)
            lines = tuple(graphs.sources.lines_of(nodes))
            self.refused.append(RefusedPartition(partition.method, backend_id, partition.nodes, lines, text))
        return False


def _places(partition: Partition) -> tuple[_Place, ...]:
    return tuple((partition.method, partition.backend_id, name) for name in partition.nodes)
