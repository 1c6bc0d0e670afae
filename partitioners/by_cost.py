"""A partitioner that delegates what is cheaper to delegate, given what operators and moving their data cost."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import networkx as nx
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import (
    Adjustment,
    CompileSpec,
    DelegationSpec,
    ExplainedResult,
    InputError,
    Partitioner,
    PartitionerContractError,
    Rejection,
    collector,
    graphs,
    measures,
)
from exir_lowering.partitioners import assignment
from exir_lowering.partitioners import limits as capacity
from exir_lowering.partitioners.assignment import Problem, Value
from exir_lowering.partitioners.by_support import compile_specs_of, reasons, supports_of
from exir_lowering.partitioners.claims import Claims
from exir_lowering.partitioners.convex import Proposal, computing, contract
from exir_lowering.partitioners.costs import HOST, CostModel, CostTable
from exir_lowering.partitioners.limits import Limits
from exir_lowering.partitioners.support import No, Scope, Support, SupportLike, asked, scopes


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a method costs by the model, nested graphs included.

    Attributes:
        chosen: As the partitioner assigns it.
        greedy: With everything delegated that a backend can take, to the first one that takes it.
        host: Without delegation.
        unit: The unit.
    """

    chosen: float
    greedy: float
    host: float
    unit: str


class CostPartitioner(Partitioner):  # type: ignore[misc]
    """Assigns operators to the host and to backends so that their cost is the least.

    The cost is the sum of what each operator costs where it is, and, for each value and each place other than its own
    where it is read, of its bytes times the model's `byte_cost`: once for each destination. Values are the results of
    operators and the method's inputs, which come from the host; the method's outputs, new values of buffers among them,
    are read on the host. Parameters, buffers and constants are everywhere. getitem, and what a support or partitioner
    wants together, is where its producer is, and has no cost.

    For one backend the assignment is the cheapest there is, by minimum cut, in exact arithmetic; of several that are,
    the one that delegates least. For B backends it is an approximation by expansion moves, see `assignment`: at most B
    times the cheapest, of which the operators' part counts once. It never costs more than leaving everything on the
    host, nor than delegating everything that can be to the first backend that takes it.

    When the model has a `call_cost`, each partition costs that too. Partitions come after the cut, so then it is a
    heuristic: from the cut and from delegating everything, partitions go back to the host as long as that is cheaper.
    It still never costs more than either of them or the host alone.

    Nested graphs are assigned first, each on its own. To what the model says of an operator that calls graphs (nothing
    is 0) comes what they cost, as assigned, or with all of their operators in the backend that takes it whole. What
    makes no tensor, such as a size, is free on the host unless the model says what it costs.

    Args:
        costs: A `CostTable`, a `RooflineModel`, or a `CostModel` of your own. What it has no cost for on a backend
            cannot be there; on the host it is an error.
        supports: For each backend what it can take, in priority order; the costs say what it should.
        compile_specs: For each backend id what it is to be told.
        limits: How small and how large a partition may be; what they drop is left to the host whatever it costs.

    Raises:
        InputError: An argument is not what it should be.
    """

    def __init__(
        self,
        costs: CostModel,
        supports: Mapping[str, SupportLike],
        *,
        compile_specs: Mapping[str, Sequence[CompileSpec]] | None = None,
        limits: Limits | None = None,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        _check_model(who, costs)
        bound = supports_of(who, supports)
        specs = compile_specs_of(who, bound, compile_specs)
        self.costs, self.limits = costs, limits or Limits()
        self.partitioner: Partitioner | None = None
        self.offers: Callable[[ExportedProgram], _Offers] = lambda program: _of_supports(bound, specs)

    @classmethod
    def from_partitioner(
        cls, costs: CostModel, partitioner: Partitioner, *, limits: Limits | None = None
    ) -> CostPartitioner:
        """Choose among what another partitioner delegates.

        Nodes stay together as in the matches of the partitioner's configurations if it has these, as XNNPACK's has, and
        they are merged into as few partitions as can be. Of other partitioners each partition is kept or left whole.
        What the partitioner takes and keeps from decomposition cannot be on the host: ExecuTorch relies on that, as
        there may be no kernel for it.

        Args:
            costs: The model; its places are the ids of the backends that the partitioner delegates to.
            partitioner: The partitioner. The operators that it wants whole are not decomposed.
            limits: How small and how large a partition may be.

        Raises:
            InputError: An argument is not what it should be.
        """
        _check_model(cls.__name__, costs)
        if not isinstance(partitioner, Partitioner):
            raise InputError(
                f"{cls.__name__}: got the partitioner {partitioner!r}, expected an ExecuTorch Partitioner."
            )
        made = cls.__new__(cls)
        Partitioner.__init__(made)
        made.costs, made.limits, made.partitioner = costs, limits or Limits(), partitioner
        made.offers = lambda program: _of_partitioner(program, partitioner)
        return made

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], Callable[[Node], bool] | None]:
        """Keep the operators whole that the partitioner chosen from wants whole."""
        if self.partitioner is None:
            return [], None
        kept: tuple[list[Any], Callable[[Node], bool] | None] = self.partitioner.ops_to_not_decompose(ep)
        return kept

    def partition(self, exported_program: ExportedProgram) -> ExplainedResult:
        """Tag what is cheaper in a backend.

        Args:
            exported_program: A program in Edge dialect; its nodes get tags.

        Returns:
            The tagged program, with a rejection for each operator that is left: with the figures, code "cost", or why
            no backend can take it.

        Raises:
            InputError: The model has no cost for an operator on the host, or a cost that is none.
            PartitionerContractError: A support, or the partitioner chosen from, raised or broke its promise.
        """
        name = type(self).__name__
        offers = self.offers(exported_program)
        planned = _plan(exported_program, offers, self.costs, _Graph.cheapest)
        claims = Claims(exported_program, {}, name)
        claims.explain(offers.rejections, offers.adjustments)
        for scope in claims.scopes():
            graph, places = planned[scope.path]
            proposals = graph.proposals(places)
            kept, dropped, changed = capacity.apply(proposals, self.limits, scope, groups=graph.groups, by=name)
            claims.claim(scope, kept)
            claims.explain(dropped, changed)
            for node in claims.left(scope):
                no = graph.why(node, places)
                if no is not None:
                    claims.reject(scope, node, no)
        result = claims.result()
        for tag, spec in result.partition_tags.items():
            result.partition_tags[tag] = offers.specs[spec.backend_id]
        return result

    def estimate(self, program: ExportedProgram) -> Estimate:
        """Tell what a program in Edge dialect costs by the model, `limits` aside. The program is not changed.

        Raises:
            InputError, PartitionerContractError: As for `partition`.
        """
        view = graphs.copy_program(program)
        offers = self.offers(view)
        chosen, greedy, host = (
            float(graph.cost(places))
            for graph, places in (
                _plan(view, offers, self.costs, how)[()] for how in (_Graph.cheapest, _Graph.greedy, _Graph.host)
            )
        )
        return Estimate(chosen, greedy, host, self.costs.unit)


def units_together(program: ExportedProgram, partitioner: Partitioner) -> list[list[Node]]:
    """Return the operators that a partitioner takes, in the units that `CostPartitioner.from_partitioner` assigns.

    Args:
        program: A program in Edge dialect; it loses the tags that it has.
        partitioner: The partitioner.

    Raises:
        PartitionerContractError: The partitioner raised or broke its promise.
    """
    offers = _of_partitioner(program, partitioner)
    found = []
    for scope in scopes(program):
        offer = offers.of(scope)
        units = _units(computing(scope.graph_module), offer, close=offers.merge)
        found += [unit for unit in units if all(offer.labels.get(n) for n in unit if not graphs.is_getitem(n))]
    return [unit for unit in found if any(map(graphs.is_operator, unit))]


def _check_model(who: str, costs: Any) -> None:
    missing = [name for name in ("node_cost", "byte_cost", "call_cost", "unit") if not hasattr(costs, name)]
    if missing:
        raise InputError(
            f"{who}: got the costs {costs!r}, which has no {', no '.join(missing)}; expected a CostTable, a "
            f"RooflineModel or an object with the methods of CostModel."
        )


# -- what can go where -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Offer:
    """What can go where in one graph.

    Attributes:
        labels: For each operator the places that take it, and the label of the partitions that it is in there.
        groups: Nodes that stay together.
        pinned: Operators that cannot be on the host.
        why: Why no place takes an operator, None when that is not known.
    """

    labels: Mapping[Node, Mapping[str, str]]
    groups: Sequence[Sequence[Node]]
    pinned: frozenset[Node]
    why: Callable[[Node], No | None]


@dataclass(frozen=True, slots=True)
class _Offers:
    """What can go where in a program.

    Attributes:
        places: The backends, in priority order.
        specs: For each label where its partitions go.
        of: The offer for a graph.
        merge: Whether what has one label may be merged, and groups have to be convex.
        rejections: What was said of operators already.
        adjustments: What was said of partitions already.
    """

    places: tuple[str, ...]
    specs: Mapping[str, DelegationSpec]
    of: Callable[[Scope], _Offer]
    merge: bool = True
    rejections: Sequence[Rejection] = ()
    adjustments: Sequence[Adjustment] = ()


def _of_supports(supports: Mapping[str, Support], compile_specs: Mapping[str, Sequence[CompileSpec]]) -> _Offers:
    def of(scope: Scope) -> _Offer:
        checks = {place: asked(support, scope) for place, support in supports.items()}
        labels = {
            node: {place: place for place, check in checks.items() if check(node) is None}
            for node in computing(scope.graph_module)
            if graphs.is_operator(node)
        }
        groups = [group for support in supports.values() for group in support.groups(scope)]
        return _Offer(labels, groups, frozenset(), reasons(supports, scope))

    specs = {place: DelegationSpec(place, list(compile_specs.get(place, ()))) for place in supports}
    return _Offers(tuple(supports), specs, of)


def _of_partitioner(program: ExportedProgram, partitioner: Partitioner) -> _Offers:
    """Let a partitioner tag the program, and take the tags as what can go where."""
    who = f"Partitioner {type(partitioner).__name__}"
    match = getattr(partitioner, "get_matched_nodes_from_configs", None)
    merge = match is not None and not getattr(partitioner, "per_op_mode", False)
    try:
        matches = [list(group) for group in match(program)] if match is not None and merge else []
        result = partitioner(program)
        tags, specs = _tags(result.tagged_exported_program), dict(result.partition_tags)
        whole = _kept_whole(program, partitioner)
    except Exception as error:
        raise PartitionerContractError(f"{who} raised {type(error).__name__}: {error}", violation="raised") from error
    for scope in (*scopes(program), *scopes(result.tagged_exported_program)):
        for node in scope.graph_module.graph.nodes:
            node.meta.pop(graphs.DELEGATION_TAG, None)
    lost = sorted(set(map(str, tags.values())) - set(specs))
    if lost:
        raise PartitionerContractError(
            f"{who} used the tag {lost[0]!r}, but partition_tags has no destination for it. Add it with a "
            f"DelegationSpec.",
            violation="tag_without_destination",
        )
    label_of = _labels(specs) if merge else {tag: tag for tag in specs}

    def of(scope: Scope) -> _Offer:
        nodes = {node: tags.get((scope.path, node.name)) for node in computing(scope.graph_module)}
        labels = {n: {specs[tag].backend_id: label_of[tag]} if tag else {} for n, tag in nodes.items()}
        groups = [group for group in matches if any(node in nodes for node in group)] if merge else _by_tag(nodes)
        pinned = frozenset(node for node, labelled in labels.items() if labelled and whole(node))
        return _Offer(labels, groups, pinned, lambda node: None)

    return _Offers(
        places=tuple(dict.fromkeys(spec.backend_id for spec in specs.values())),
        specs={label_of[tag]: spec for tag, spec in specs.items()},
        of=of,
        merge=merge,
        rejections=getattr(result, "rejections", None) or (),
        adjustments=getattr(result, "adjustments", None) or (),
    )


def _tags(program: ExportedProgram) -> dict[tuple[tuple[str, ...], str], str]:
    """Return the tag of each tagged operator, by its path and name: a partitioner may have tagged a copy."""
    tagged = (
        ((scope.path, node.name), node.meta.get(graphs.DELEGATION_TAG))
        for scope in scopes(program)
        for node in computing(scope.graph_module)
    )
    return {key: tag for key, tag in tagged if tag is not None}


def _kept_whole(program: ExportedProgram, partitioner: Partitioner) -> Callable[[Node], bool]:
    operators, wanted = partitioner.ops_to_not_decompose(program)
    names = {graphs.target_name(operator) for operator in operators}
    return lambda node: graphs.operator_name(node) in names and (wanted is None or bool(wanted(node)))


def _labels(specs: Mapping[str, DelegationSpec]) -> dict[str, str]:
    """Give tags that go to the same backend with the same compile specs the same label."""
    known: list[tuple[DelegationSpec, str]] = []
    labels: dict[str, str] = {}
    for tag, spec in specs.items():
        label = next((label for other, label in known if _same(spec, other)), None)
        if label is None:
            label = f"{spec.backend_id}_{len(known)}"
            known.append((spec, label))
        labels[tag] = label
    return labels


def _same(one: DelegationSpec, other: DelegationSpec) -> bool:
    return one.backend_id == other.backend_id and list(one.compile_specs) == list(other.compile_specs)


def _by_tag(tag_of: Mapping[Node, str | None]) -> list[list[Node]]:
    groups: dict[str, list[Node]] = {}
    for node, tag in tag_of.items():
        if tag is not None:
            groups.setdefault(tag, []).append(node)
    return list(groups.values())


# -- what it costs -----------------------------------------------------------------------------------------------------


class _Costs:
    """A model's answers, checked and exact.

    Raises:
        InputError: The model has no cost for an operator on the host, or an answer is no cost.
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.per_byte = _exact("byte_cost", model.byte_cost)

    def check(self, offered: Iterable[tuple[Scope, _Offer]]) -> None:
        """Check that what can be on the host has a cost there."""
        unknown = {
            graphs.operator_name(node): None
            for scope, offer in offered
            for node in computing(scope.graph_module)
            if graphs.is_operator(node) and node not in offer.pinned and self.at(scope, node, HOST) is None
        }
        if unknown:
            raise InputError(_unknown(self.model, list(unknown)))

    def at(self, scope: Scope, node: Node, place: str) -> Fraction | None:
        """Return what an operator costs, the graphs that it calls aside when it is on the host."""
        if not graphs.is_operator(node):
            return Fraction(0)
        said = self.model.node_cost(node, place)
        called = list(graphs.nested_graphs(scope.graph_module, node))
        free = called or (place == HOST and not any(True for _ in measures.tensors(node.meta.get("val"))))
        if said is None:
            total = Fraction(0) if free else None
        else:
            total = _exact(f"node_cost({node.name} ({graphs.operator_name(node)}), {place!r})", said)
        if place == HOST:
            return total
        for nested in called:
            inner = Scope(nested.module)
            for other in computing(nested.module):
                cost = self.at(inner, other, place)
                total = None if total is None or cost is None else total + cost
        return total

    def call(self, place: str) -> Fraction:
        """Return what a call costs."""
        return _exact(f"call_cost({place!r})", self.model.call_cost(place))


def _exact(what: str, cost: Any) -> Fraction:
    try:
        number = Fraction(cost)
    except (TypeError, ValueError, OverflowError):
        number = Fraction(-1)
    if number < 0:
        raise InputError(f"The cost model's {what} is {cost!r}, expected a finite number of at least 0.")
    return number


def _unknown(model: CostModel, names: Sequence[str]) -> str:
    known = sorted({key.partition("(")[0] for key in model.places[HOST]}) if isinstance(model, CostTable) else []
    listed = []
    for name in names:
        close = difflib.get_close_matches(name, known, n=2)
        listed.append(name + (f" (it has {' and '.join(close)})" if close else ""))
    return (
        f"The cost model has no cost on the host for {', '.join(listed)}. Everything can stay there, so add what it "
        f"costs; a CostTable can have a default={{{HOST!r}: cost}}."
    )


# -- the assignment ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Graph:
    """One graph as a problem in whole numbers, of which `scale` make one unit of cost.

    Attributes:
        nodes: Its computing nodes.
        units: The nodes that are at one place, each in graph order.
        unit_of: For each node the number of its unit.
        places: The names of the places, the host first.
        problem: The problem.
        calls: For each place what a partition costs.
        scale: The scale.
        offer: What can go where.
        groups: Units that have to be one vertex when partitions are made.
        measure: The unit in which costs are told.
    """

    nodes: list[Node]
    units: list[list[Node]]
    unit_of: Mapping[Node, int]
    places: tuple[str, ...]
    problem: Problem
    calls: list[int]
    scale: int
    offer: _Offer
    groups: list[list[Node]]
    measure: str

    def cheapest(self) -> list[int]:
        """Return the best place of each unit that is found."""
        with collector.paused():
            return assignment.with_calls(self.problem, self.calls, self._partitions)

    def greedy(self) -> list[int]:
        """Delegate everything."""
        return assignment.greedy(self.problem)

    def host(self) -> list[int]:
        """Delegate nothing."""
        return assignment.host(self.problem)

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
        """Return what an assignment costs, calls included."""
        total = assignment.cost(self.problem, places)
        if any(self.calls):
            total += sum(self.calls[places[units[0]]] for units in self._partitions(places))
        return Fraction(total, self.scale)

    def why(self, node: Node, places: Sequence[int]) -> No | None:
        """Say why an operator is on the host."""
        unit = self.unit_of[node]
        costs = self.problem.costs[unit]
        possible = [place for place, cost in enumerate(costs) if place and cost is not None]
        if possible:
            return self._dearer(unit, possible, places)
        takers = ", ".join(self.offer.labels.get(node) or ())
        if not takers:
            return self.offer.why(node)
        if sum(map(graphs.is_operator, self.units[unit])) > 1:
            return No("group", f"{takers} takes it, but not all that it must stay together with, or not at a cost", "")
        return No("cost", f"{takers} takes it, but there is no cost of {graphs.operator_name(node)} there", "")

    def _dearer(self, unit: int, possible: Iterable[int], places: Sequence[int]) -> No:
        values = [v for v in self.problem.values if unit == v.producer or unit in v.readers]

        def elsewhere(place: int) -> tuple[int, int, int]:
            tried = list(places)
            tried[unit] = place
            data = assignment.moved(values, tried) - assignment.moved(values, places)
            cost = self.problem.costs[unit][place] or 0
            return cost + data + self.calls[place], place, data

        total, place, data = min(map(elsewhere, possible))
        there = self.problem.costs[unit][0] or 0
        text = f"{self._told(there)} there, {self._told(total - data - self.calls[place])} on {self.places[place]}"
        text += f" and {self._told(data)} to move its data" if data > 0 else ""
        text += f", which saves {self._told(-data)} of moving data" if data < 0 else ""
        text += f" and {self._told(self.calls[place])} for a call" if self.calls[place] else ""
        count = sum(map(graphs.is_operator, self.units[unit]))
        group = f" with the {count} operators that stay together" if count > 1 else ""
        return No("cost", f"{'as cheap' if total == there else 'cheaper'} on the host{group}: {text}", "")

    def _told(self, cost: int) -> str:
        return f"{float(Fraction(cost, self.scale)):.2g} {'s' if self.measure == 'seconds' else self.measure}"


_Planned = dict[tuple[str, ...], tuple[_Graph, list[int]]]


def _plan(program: ExportedProgram, offers: _Offers, model: CostModel, how: Callable[[_Graph], list[int]]) -> _Planned:
    """Assign each graph, nested ones first: what they cost is what their call costs on the host."""
    costs = _Costs(model)
    offered = [(scope, offers.of(scope)) for scope in scopes(program)]
    costs.check(offered)
    planned: _Planned = {}
    for scope, offer in reversed(offered):
        graph = _graph(scope, offers, offer, costs, planned)
        planned[scope.path] = graph, how(graph)
    return planned


def _graph(scope: Scope, offers: _Offers, offer: _Offer, costs: _Costs, planned: _Planned) -> _Graph:
    nodes = computing(scope.graph_module)
    units = _units(nodes, offer, close=offers.merge)
    unit_of = {node: number for number, unit in enumerate(units) for node in unit}
    places = (HOST, *offers.places)
    rows = [_row(unit, places, scope, offer, costs, planned) for unit in units]
    calls = [Fraction(0), *map(costs.call, offers.places)]
    known = (*calls, costs.per_byte, *(cost for row in rows for cost in row if cost is not None))
    scale = max(cost.denominator for cost in known)
    if any(scale % cost.denominator for cost in known):  # floats have powers of two
        scale = math.lcm(*(cost.denominator for cost in known))
    problem = Problem(
        [[None if cost is None else int(cost * scale) for cost in row] for row in rows],
        _values(scope, nodes, unit_of, int(costs.per_byte * scale)),
    )
    return _Graph(
        nodes=nodes,
        units=units,
        unit_of=unit_of,
        places=places,
        problem=problem,
        calls=[int(call * scale) for call in calls],
        scale=scale,
        offer=offer,
        groups=[unit for unit in units if sum(map(graphs.is_operator, unit)) > 1] if offers.merge else [],
        measure=costs.model.unit,
    )


def _units(nodes: Sequence[Node], offer: _Offer, *, close: bool) -> list[list[Node]]:
    """Return what is at one place: getitems and their producers, groups, and what lies between the nodes of a group."""
    sets = nx.utils.UnionFind(nodes)
    inside = set(nodes)
    for node in nodes:
        if graphs.is_getitem(node) and node.args[0] in inside:
            sets.union(node.args[0], node)
    grouped = False
    for group in offer.groups:
        members = [node for node in group if node in inside]
        if len(members) > 1:
            sets.union(*members)
            grouped = True
    if grouped and close:
        between = nx.DiGraph((sets[node], sets[user]) for node in nodes for user in node.users if user in inside)
        for component in nx.strongly_connected_components(between):
            sets.union(*component)
    units: dict[Node, list[Node]] = {}
    for node in nodes:
        units.setdefault(sets[node], []).append(node)
    return list(units.values())


def _row(
    unit: Sequence[Node], places: Sequence[str], scope: Scope, offer: _Offer, costs: _Costs, planned: _Planned
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
                    f"The cost model has no cost of {graphs.operator_name(node)} on {place}, where it has to be as "
                    f"{place}'s partitioner keeps it from decomposition. Add the cost."
                )
    return [row[0] or Fraction(0), *row[1:]]


def _unit_cost(
    unit: Sequence[Node], place: str, scope: Scope, offer: _Offer, costs: _Costs, planned: _Planned
) -> Fraction | None:
    """Return what a unit costs at a place, None when it cannot be there."""
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


def _values(scope: Scope, nodes: Sequence[Node], unit_of: Mapping[Node, int], per_byte: int) -> list[Value]:
    inputs = [n for n in scope.graph_module.graph.nodes if n.op == "placeholder" and n not in scope.constants]
    values = []
    for node in (*inputs, *nodes):
        producer = unit_of.get(node, assignment.HOST)
        readers = dict.fromkeys(unit_of.get(user, assignment.HOST) for user in node.users)
        readers.pop(producer, None)
        weight = measures.value_bytes(node) * per_byte if readers else 0
        if weight:
            values.append(Value(weight, producer, tuple(readers)))
    return values


__all__ = ["CostPartitioner", "Estimate", "units_together"]
