"""The cheapest places for units of work that pass values to each other, in whole numbers: minimum cuts.

The cost of an assignment is what each unit costs at its place, plus, for each value and each place other than the
producer's where a unit reads it, the value's weight: once per destination, however many units read it there.

An expansion move (Boykov, Veksler, Zabih, Fast Approximate Energy Minimization via Graph Cuts, PAMI 23, 2001) lets
every unit keep its place or go to one given place; the cheapest move is a minimum cut. With one place besides the host
the best move from "all on the host" is the optimum. With several, moves are made until none lowers the cost.

The result, for B places besides the host, costs: the units' part of an optimum at most, plus B times its values' part;
so at most B times the optimum. Proof: let x be the result, y an optimum, and, for each place a, x_a the move of x that
sends to a what is at a in y; it does not lower the cost. Added up over all a, each unit changes from x to y once. A
value that y sends to k >= 1 places involves k + 1 places a. If x sends it to the set D, then x_a sends it to at most
one place more, and only if a is neither in D nor the producer's place in x: this happens at most B - |D| times. So what
the value costs in x is at most B, while it costs k >= 1 in y. A value that does not cross in y crosses in no x_a that
touches it, which removes what it costs in x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

HOST = -1
"""As a producer or reader of a value: the caller, which is on the host in every assignment."""

_KEEP, _MOVE = "keep", "move"
_Vertex = int | str


@dataclass(frozen=True, slots=True)
class AssignedValue:
    """A result of a unit that others read."""

    weight: int  # what it costs to move it to another place
    producer: int  # the unit that makes it, or `HOST`
    readers: tuple[int, ...]  # units, each once, without the producer; `HOST` may be one


@dataclass(frozen=True, slots=True)
class AssignmentProblem:
    """Units, places and values.

    For each unit, `costs` has what it costs at each place, None where it cannot be; each unit has a possible place.
    Place 0 is the host, the others follow in priority order.
    """

    costs: Sequence[Sequence[int | None]]
    values: Sequence[AssignedValue]

    @property
    def places(self) -> int:
        """The number of places, including the host."""
        return len(self.costs[0]) if self.costs else 1


Assignment = list[int]
"""The place of each unit."""


def compute_cost(problem: AssignmentProblem, places: Sequence[int]) -> int:
    """Return what an assignment costs."""
    units = sum(costs[place] or 0 for costs, place in zip(problem.costs, places, strict=True))
    return units + sum_moves(problem.values, places)


def sum_moves(values: Iterable[AssignedValue], places: Sequence[int] | Mapping[int, int]) -> int:
    """Return what it costs to move values to their readers."""
    return sum(value.weight * len(_find_destinations(value, places)) for value in values)


def _find_destinations(value: AssignedValue, places: Sequence[int] | Mapping[int, int]) -> set[int]:
    return {_place_of(reader, places) for reader in value.readers} - {_place_of(value.producer, places)}


def _place_of(unit: int, places: Sequence[int] | Mapping[int, int]) -> int:
    return 0 if unit == HOST else places[unit]


def assign_to_host(problem: AssignmentProblem) -> Assignment:
    """Leave on the host what can be there, and send the rest to the first place that takes it."""
    return [next((p for p, c in enumerate(costs) if c is not None), 0) for costs in problem.costs]


def assign_greedily(problem: AssignmentProblem) -> Assignment:
    """Send each unit to the first place after the host that takes it."""
    return [next((p for p, c in enumerate(costs) if p and c is not None), 0) for costs in problem.costs]


def find_cheapest(problem: AssignmentProblem) -> Assignment:
    """Assign every unit to a place.

    With one place besides the host, an optimum: among several, the one with the fewest units there. With B of them, at
    most B times the optimum, see above. Never worse than `assign_greedily` and `assign_to_host`. Equal problems give
    equal results.
    """
    if problem.places == 2:
        return expand(problem, assign_to_host(problem), 1)
    places = assign_greedily(problem)
    lowest = compute_cost(problem, places)
    unchanged, place = 0, 0
    while unchanged < problem.places:
        tried = expand(problem, places, place)
        found = compute_cost(problem, tried)
        unchanged = 0 if found < lowest else unchanged + 1
        if found < lowest:
            places, lowest = tried, found
        place = (place + 1) % problem.places
    return min(places, assign_to_host(problem), key=lambda candidate: compute_cost(problem, candidate))


def expand(problem: AssignmentProblem, places: Sequence[int], place: int) -> Assignment:
    """Make the cheapest move in which every unit keeps its place or goes to the given one, with the fewest that go."""
    network = _Network(problem, places, place)
    for unit, costs in enumerate(problem.costs):
        network.charge_unit(unit, costs)
    for value in problem.values:
        network.charge_value(value)
    going = network.cut()
    return [place if unit in going else at for unit, at in enumerate(places)]


Partitions = Callable[[Sequence[int]], "list[list[int]]"]
"""Returns the partitions that an assignment makes, each as its units, all of which are at one place."""


def assign_with_calls(problem: AssignmentProblem, calls: Sequence[int], partitions: Partitions) -> Assignment:
    """Assign every unit to a place if each partition also has a cost, which no cut can express.

    From `find_cheapest` and from `assign_greedily`, whole partitions go back to the host while that lowers the cost:
    calls included, no more than those two and `assign_to_host` cost. `calls` has the cost of a partition at each place,
    0 for the host; `partitions` returns those that an assignment makes.
    """
    if not any(calls):
        return find_cheapest(problem)
    touching: list[list[AssignedValue]] = [[] for _ in problem.costs]
    for value in problem.values:
        for unit in (value.producer, *value.readers):
            if unit != HOST:
                touching[unit].append(value)

    def total(places: Sequence[int]) -> tuple[int, list[list[int]]]:
        found = partitions(places)
        return compute_cost(problem, places) + sum(calls[places[units[0]]] for units in found), found

    def give_back(places: Assignment) -> tuple[int, Assignment]:
        lowest, found = total(places)
        while True:
            tried = list(places)
            for units in found:
                _give_back(problem, touching, calls, units, tried)
            after, parts = total(tried)
            if after >= lowest:
                return lowest, places
            places, lowest, found = tried, after, parts

    candidates = [
        give_back(find_cheapest(problem)),
        give_back(assign_greedily(problem)),
        (compute_cost(problem, assign_to_host(problem)), assign_to_host(problem)),
    ]
    return min(candidates, key=lambda candidate: candidate[0])[1]


def _give_back(
    problem: AssignmentProblem,
    touching: Sequence[Sequence[AssignedValue]],
    calls: Sequence[int],
    units: Sequence[int],
    places: Assignment,
) -> None:
    """Move a partition back to the host if that is cheaper while the others stay."""
    at = places[units[0]]
    if any(problem.costs[unit][0] is None for unit in units):
        return
    values = {id(value): value for unit in units for value in touching[unit]}.values()
    saved = calls[at] + sum((problem.costs[unit][at] or 0) - (problem.costs[unit][0] or 0) for unit in units)
    saved += sum_moves(values, places)
    for unit in units:
        places[unit] = 0
    if saved <= sum_moves(values, places):
        for unit in units:
            places[unit] = at


class _Network:
    """The cut of one move: units that keep their place are on the source's side, those that go on the sink's.

    A unit that cannot go is merged with the source, one that is already there with the sink.
    """

    def __init__(self, problem: AssignmentProblem, places: Sequence[int], place: int) -> None:
        self.places, self.place = places, place
        self.vertices: list[_Vertex] = [self._find_vertex(unit, costs) for unit, costs in enumerate(problem.costs)]
        self.auxiliary = len(problem.costs)
        self.capacity: dict[tuple[_Vertex, _Vertex], int] = {}
        self.unlimited: list[tuple[_Vertex, _Vertex]] = []

    def _find_vertex(self, unit: int, costs: Sequence[int | None]) -> _Vertex:
        if self.places[unit] == self.place:
            return _MOVE
        return unit if costs[self.place] is not None else _KEEP

    def _vertex_of(self, unit: int) -> _Vertex:
        if unit == HOST:
            return _KEEP if self.place else _MOVE
        return self.vertices[unit]

    def _add_arc(self, keeps: _Vertex, goes: _Vertex, weight: int) -> None:
        """Charge a weight if the first keeps its place and the second goes."""
        if keeps != goes and weight and keeps != _MOVE and goes != _KEEP:
            self.capacity[keeps, goes] = self.capacity.get((keeps, goes), 0) + weight

    def charge_unit(self, unit: int, costs: Sequence[int | None]) -> None:
        """Charge a unit for its place."""
        there, here = costs[self.place], costs[self.places[unit]]
        if self.vertices[unit] == unit and there is not None and here is not None:
            self._add_arc(_KEEP, unit, there - min(there, here))
            self._add_arc(unit, _MOVE, here - min(there, here))

    def charge_value(self, value: AssignedValue) -> None:
        """Charge a value for each destination: those of readers that keep their place, and the place of the move."""
        producer, at = self._vertex_of(value.producer), _place_of(value.producer, self.places)
        staying: dict[int, list[_Vertex]] = {}
        for reader in value.readers:
            staying.setdefault(_place_of(reader, self.places), []).append(self._vertex_of(reader))
        if at != self.place:
            self._charge_if_any_goes(producer, [self._vertex_of(reader) for reader in value.readers], value.weight)
        for destination, readers in staying.items():
            if destination != self.place:
                self._charge_if_any_keeps(readers, producer if destination == at else _MOVE, value.weight)

    def _charge_if_any_goes(self, keeps: _Vertex, going: Sequence[_Vertex], weight: int) -> None:
        """Charge if the first keeps its place and any of the others goes."""
        self._add_arc(keeps, self._join(going, _MOVE, _KEEP), weight)

    def _charge_if_any_keeps(self, keeping: Sequence[_Vertex], goes: _Vertex, weight: int) -> None:
        """Charge if any of the first keeps its place and the last goes."""
        if goes != _KEEP:
            self._add_arc(self._join(keeping, _KEEP, _MOVE), goes, weight)

    def _join(self, vertices: Sequence[_Vertex], side: str, other: str) -> _Vertex:
        """Return a vertex that must be on a side as soon as any of several vertices is there."""
        if side in vertices:
            return side
        free = [vertex for vertex in vertices if vertex != other]
        if len(free) < 2:
            return free[0] if free else other
        vertex, self.auxiliary = self.auxiliary, self.auxiliary + 1
        self.unlimited += [(vertex, v) if side == _MOVE else (v, vertex) for v in free]
        return vertex

    def cut(self) -> set[_Vertex]:
        """Return the sink's side of the minimum cut, the smallest if there are several."""
        graph = nx.DiGraph()
        graph.add_nodes_from((_KEEP, _MOVE))
        graph.add_edges_from(self.unlimited)
        graph.add_edges_from((a, b, {"capacity": weight}) for (a, b), weight in self.capacity.items())
        _, (_, going) = nx.minimum_cut(graph, _KEEP, _MOVE, flow_func=boykov_kolmogorov)
        found: set[_Vertex] = going
        return found
