"""A graph as an assignment problem in whole numbers: what its operators cost at each place, and what crosses."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import InputError, Partitioner, graphs
from exir_lowering.graphs import collector, measures
from exir_lowering.graphs.together import Together
from exir_lowering.partitioners.algorithms import assignment
from exir_lowering.partitioners.algorithms.assignment import AssignedValue, AssignmentProblem
from exir_lowering.partitioners.algorithms.convex import Proposal, contract, list_computing
from exir_lowering.partitioners.algorithms.offers import Offer, Offers, offers_of_partitioner
from exir_lowering.partitioners.cost.tables import CostTable
from exir_lowering.partitioners.supports.support import No, Scope, scopes
from exir_lowering.plugins import HOST, CostModel

# -- what it costs -----------------------------------------------------------------------------------------------------


class ExactCosts:
    """A model's answers, checked and exact: InputError for an invalid one, or an operator without one on the host."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.per_byte = _make_exact("byte_cost", model.byte_cost)

    def check(self, offered: Iterable[tuple[Scope, Offer]]) -> None:
        """Check that operators that can be on the host have a cost there."""
        unknown = {
            graphs.operator_name(node): None
            for scope, offer in offered
            for node in list_computing(scope.graph_module)
            if graphs.is_operator(node) and node not in offer.pinned and self.at(scope, node, HOST) is None
        }
        if unknown:
            raise InputError(_describe_unknown(self.model, list(unknown)))

    def at(self, scope: Scope, node: Node, place: str) -> Fraction | None:
        """Return what an operator costs; on the host, without the graphs that it calls."""
        if not graphs.is_operator(node):
            return Fraction(0)
        said = self.model.node_cost(node, place)
        called = list(graphs.nested_graphs(scope.graph_module, node))
        free = called or (place == HOST and not any(True for _ in measures.tensors(node.meta.get("val"))))
        if said is None:
            total = Fraction(0) if free else None
        else:
            total = _make_exact(f"node_cost({node.name} ({graphs.operator_name(node)}), {place!r})", said)
        if place == HOST:
            return total
        for nested in called:
            inner = Scope(nested.module)
            for other in list_computing(nested.module):
                cost = self.at(inner, other, place)
                total = None if total is None or cost is None else total + cost
        return total

    def call(self, place: str) -> Fraction:
        """Return what a call costs."""
        return _make_exact(f"call_cost({place!r})", self.model.call_cost(place))


def _make_exact(what: str, cost: Any) -> Fraction:
    try:
        number = Fraction(cost)
    except (TypeError, ValueError, OverflowError):
        number = Fraction(-1)
    if number < 0:
        raise InputError(f"The cost model's {what} is {cost!r}, expected a finite number of at least 0.")
    return number


def _describe_unknown(model: CostModel, names: Sequence[str]) -> str:
    known = sorted({key.partition("(")[0] for key in model.places[HOST]}) if isinstance(model, CostTable) else []
    listed = []
    for name in names:
        close = difflib.get_close_matches(name, known, n=2)
        listed.append(name + (f" (it has {' and '.join(close)})" if close else ""))
    return (
        f"The cost model has no cost on the host for {', '.join(listed)}. Every operator can stay there, so add "
        f"the cost; a CostTable can have a default={{{HOST!r}: cost}}."
    )


# -- the problem -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CostGraph:
    """One graph as a problem in whole numbers; `scale` of them are one unit of cost."""

    nodes: list[Node]  # that compute
    units: list[list[Node]]  # sets of nodes that stay at one place, each in graph order
    unit_of: Mapping[Node, int]  # the number of each node's unit
    places: tuple[str, ...]  # the host first
    problem: AssignmentProblem
    calls: list[int]  # for each place, what a partition costs
    scale: int
    offer: Offer
    groups: list[list[Node]]  # units that must be one vertex when partitions are made
    touching: Mapping[int, list[AssignedValue]]  # for each unit, the values that it makes or reads
    measure: str  # the unit of costs, for messages

    def cheapest(self) -> list[int]:
        """Return the best assignment found: the place of each unit."""
        with collector.paused():
            return assignment.assign_with_calls(self.problem, self.calls, self._partitions)

    def greedy(self) -> list[int]:
        """Return the assignment that delegates everything possible."""
        return assignment.assign_greedily(self.problem)

    def host(self) -> list[int]:
        """Return the assignment that delegates nothing."""
        return assignment.assign_to_host(self.problem)

    def proposals(self, places: Sequence[int]) -> list[Proposal]:
        """Return the partitions of an assignment."""
        label_of = {
            node: self.offer.labels[node][self.places[place]]
            for unit, place in zip(self.units, places, strict=True)
            for node in unit
            if place and graphs.is_operator(node)
        }
        return contract(self.nodes, label_of, groups=self.groups)

    def _partitions(self, places: Sequence[int]) -> list[list[int]]:
        return [list(dict.fromkeys(self.unit_of[n] for n in proposal.nodes)) for proposal in self.proposals(places)]

    def cost(self, places: Sequence[int]) -> Fraction:
        """Return what an assignment costs, including calls."""
        total = assignment.compute_cost(self.problem, places)
        if any(self.calls):
            total += sum(self.calls[places[units[0]]] for units in self._partitions(places))
        return Fraction(total, self.scale)

    def why(self, node: Node, places: Sequence[int]) -> No | None:
        """Return why an operator is on the host."""
        unit = self.unit_of[node]
        costs = self.problem.costs[unit]
        possible = [place for place, cost in enumerate(costs) if place and cost is not None]
        if possible:
            return self._dearer(unit, possible, places)
        takers = ", ".join(self.offer.labels.get(node) or ())
        if not takers:
            return self.offer.why(node)
        if sum(map(graphs.is_operator, self.units[unit])) > 1:
            return No(
                "group", f"{takers} takes it, but not everything that it must stay with, or has no cost for it", ""
            )
        return No("cost", f"{takers} takes it, but there is no cost of {graphs.operator_name(node)} there", "")

    def _dearer(self, unit: int, possible: Iterable[int], places: Sequence[int]) -> No:
        values = self.touching.get(unit, [])
        units = {other for value in values for other in (value.producer, *value.readers)}
        tried = {other: 0 if other == assignment.HOST else places[other] for other in units}
        before = assignment.sum_moves(values, tried)

        def elsewhere(place: int) -> tuple[int, int, int]:
            data = assignment.sum_moves(values, {**tried, unit: place}) - before
            cost = self.problem.costs[unit][place] or 0
            return cost + data + self.calls[place], place, data

        total, place, data = min(map(elsewhere, possible))
        there = self.problem.costs[unit][0] or 0
        text = f"{self._format(there)} there, {self._format(total - data - self.calls[place])} on {self.places[place]}"
        text += f" and {self._format(data)} to move its data" if data > 0 else ""
        text += f", which saves {self._format(-data)} of moving data" if data < 0 else ""
        text += f" and {self._format(self.calls[place])} for a call" if self.calls[place] else ""
        count = sum(map(graphs.is_operator, self.units[unit]))
        group = f" with the {count} operators that stay together" if count > 1 else ""
        return No("cost", f"{'as cheap' if total == there else 'cheaper'} on the host{group}: {text}", "")

    def _format(self, cost: int) -> str:
        return f"{float(Fraction(cost, self.scale)):.2g} {'s' if self.measure == 'seconds' else self.measure}"


Planned = dict[tuple[str, ...], tuple[CostGraph, list[int]]]


def plan_graphs(
    program: ExportedProgram, offers: Offers, model: CostModel, how: Callable[[CostGraph], list[int]]
) -> Planned:
    """Assign each graph, nested ones first: their cost is that of their call on the host."""
    costs = ExactCosts(model)
    offered = [(scope, offers.of(scope)) for scope in scopes(program)]
    costs.check(offered)
    planned: Planned = {}
    for scope, offer in reversed(offered):
        graph = _graph(scope, offers, offer, costs, planned)
        planned[scope.path] = graph, how(graph)
    return planned


def _graph(scope: Scope, offers: Offers, offer: Offer, costs: ExactCosts, planned: Planned) -> CostGraph:
    nodes = list_computing(scope.graph_module)
    units = group_together(nodes, offer, close=offers.merge)
    unit_of = {node: number for number, unit in enumerate(units) for node in unit}
    places = (HOST, *offers.places)
    rows = [_row(unit, places, scope, offer, costs, planned) for unit in units]
    calls = [Fraction(0), *map(costs.call, offers.places)]
    known = (*calls, costs.per_byte, *(cost for row in rows for cost in row if cost is not None))
    scale = max(cost.denominator for cost in known)
    if any(scale % cost.denominator for cost in known):  # the denominators of floats are powers of two
        scale = math.lcm(*(cost.denominator for cost in known))
    problem = AssignmentProblem(
        [[None if cost is None else int(cost * scale) for cost in row] for row in rows],
        _values(scope, nodes, unit_of, int(costs.per_byte * scale)),
    )
    return CostGraph(
        nodes=nodes,
        units=units,
        unit_of=unit_of,
        places=places,
        problem=problem,
        calls=[int(call * scale) for call in calls],
        scale=scale,
        offer=offer,
        groups=[unit for unit in units if sum(map(graphs.is_operator, unit)) > 1] if offers.merge else [],
        touching=_touching(problem.values),
        measure=costs.model.unit,
    )


def _touching(values: Iterable[AssignedValue]) -> dict[int, list[AssignedValue]]:
    found: dict[int, list[AssignedValue]] = {}
    for value in values:
        for unit in dict.fromkeys((value.producer, *value.readers)):
            found.setdefault(unit, []).append(value)
    return found


def group_together(nodes: Sequence[Node], offer: Offer, *, close: bool) -> list[list[Node]]:
    """Return the nodes of each unit: getitems and their producers, groups, and what is between the nodes of a group."""
    together = Together(nodes)
    grouped = [together.join(group) for group in offer.groups]
    if any(grouped) and close:
        together.close()
    return list(together.members().values())


def units_together(program: ExportedProgram, partitioner: Partitioner) -> list[list[Node]]:
    """Return the operators that a partitioner takes, in the units that `CostPartitioner.from_partitioner` assigns.

    The program, in Edge dialect, loses its tags. Raises PartitionerContractError if the partitioner raises or breaks
    its contract.
    """
    offers = offers_of_partitioner(program, partitioner)
    found = []
    for scope in scopes(program):
        offer = offers.of(scope)
        together = group_together(list_computing(scope.graph_module), offer, close=offers.merge)
        found += [unit for unit in together if all(offer.labels.get(n) for n in unit if not graphs.is_getitem(n))]
    return [unit for unit in found if any(map(graphs.is_operator, unit))]


def _row(
    unit: Sequence[Node], places: Sequence[str], scope: Scope, offer: Offer, costs: ExactCosts, planned: Planned
) -> list[Fraction | None]:
    """Return what a unit costs at each place, None where it cannot be."""
    row = [_unit_cost(unit, place, scope, offer, costs, planned) for place in places]
    if offer.pinned.isdisjoint(unit):
        return row
    if any(cost is not None for cost in row[1:]):
        return [None, *row[1:]]
    for node in unit:
        for place in offer.labels.get(node, {}):
            if costs.at(scope, node, place) is None:
                raise InputError(
                    f"The cost model has no cost of {graphs.operator_name(node)} on {place}, where it must be, since "
                    f"{place}'s partitioner keeps it from decomposition. Add the cost."
                )
    return [row[0] or Fraction(0), *row[1:]]


def _unit_cost(
    unit: Sequence[Node], place: str, scope: Scope, offer: Offer, costs: ExactCosts, planned: Planned
) -> Fraction | None:
    """Return what a unit costs at a place, None if it cannot be there."""
    labels = {offer.labels.get(node, {}).get(place) for node in unit if not graphs.is_getitem(node)}
    if place != HOST and (len(labels) != 1 or None in labels):
        return None
    total = Fraction(0)
    for node in unit:
        cost = costs.at(scope, node, place)
        if cost is None:
            return None
        total += cost
        if place == HOST:
            for nested in graphs.nested_graphs(scope.graph_module, node):
                path = (*scope.path, nested.name)
                graph, places = planned[path]
                total += graph.cost(places)
    return total


def _values(scope: Scope, nodes: Sequence[Node], unit_of: Mapping[Node, int], per_byte: int) -> list[AssignedValue]:
    inputs = [n for n in scope.graph_module.graph.nodes if n.op == "placeholder" and n not in scope.constants]
    values = []
    for node in (*inputs, *nodes):
        producer = unit_of.get(node, assignment.HOST)
        readers = dict.fromkeys(unit_of.get(user, assignment.HOST) for user in node.users)
        readers.pop(producer, None)
        weight = measures.value_bytes(node) * per_byte if readers else 0
        if weight:
            values.append(AssignedValue(weight, producer, tuple(readers)))
    return values


__all__ = ["CostGraph", "Planned", "group_together", "plan_graphs", "units_together"]
