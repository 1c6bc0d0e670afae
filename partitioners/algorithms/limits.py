"""Fragmentation and capacity: which proposals are too small to be worth a call, and which are too large for one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch.fx import Node

from exir_lowering import Adjustment, InputError, Rejection, graphs
from exir_lowering.graphs import collector, measures, quotient
from exir_lowering.graphs.together import Together
from exir_lowering.partitioners.algorithms import cuts
from exir_lowering.partitioners.algorithms.convex import Proposal, contract, list_computing
from exir_lowering.partitioners.supports.support import GraphScope
from exir_lowering.plugins import HOST
from exir_lowering.plugins.costs import planned_costs


@dataclass(frozen=True, slots=True)
class Limits:
    """How small and how large a partition may be.

    Attributes:
        min_nodes: A partition with fewer operators is dropped, unless it is the whole graph.
        min_flops: A partition with fewer floating-point operations is dropped, unless it is the whole graph.
        max_partitions: How many partitions a graph keeps: those with the most floating-point operations.
        max_nodes: A partition with more operators is cut where the fewest bytes cross.
        max_weight_bytes: A partition with more bytes of parameters, buffers and constants is also cut.
        min_gain: A partition is kept only if it saves at least so many seconds of each call of the method, as a plan
            predicts it, also if it is the whole graph: what its operators take on the host, less what they and a call
            take in the backend, and what bringing data there takes. The costs are those of `LoweringOptions(costs=)`.

    Raises:
        InputError: A limit is not a number, is out of range, or leaves no size between `min_nodes` and `max_nodes`.
    """

    min_nodes: int = 1
    min_flops: int = 0
    max_partitions: int | None = None
    max_nodes: int | None = None
    max_weight_bytes: int | None = None
    min_gain: float | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value, optional = getattr(self, name), least > 0
            if not (value is None and optional) and (not _is_integer(value) or value < least):
                none = ", or None for no limit" if optional else ""
                raise InputError(f"Limits({name}={value!r}): expected an integer, {least} or more{none}.")
        number = _is_integer(self.min_gain) or isinstance(self.min_gain, float)
        if self.min_gain is not None and not (number and 0 <= self.min_gain < math.inf):
            raise InputError(
                f"Limits(min_gain={self.min_gain!r}): expected a number of seconds, 0 or more, or None for no limit."
            )
        if self.max_nodes is not None and self.min_nodes > self.max_nodes:
            raise InputError(
                f"Limits(min_nodes={self.min_nodes}, max_nodes={self.max_nodes}): no partition can have at least "
                f"min_nodes and at most max_nodes operators. Expected min_nodes of at most {self.max_nodes}."
            )


_LEAST = {"min_nodes": 0, "min_flops": 0, "max_partitions": 1, "max_nodes": 1, "max_weight_bytes": 1}


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def apply(
    proposals: Sequence[Proposal], limits: Limits, scope: GraphScope, *, groups: Iterable[Iterable[Node]] = (), by: str
) -> tuple[list[Proposal], list[Rejection], list[Adjustment]]:
    """Cut what is too large, drop what is too small, then what is too many, of the proposals of one graph.

    Returns what is left, in order, a rejection for each operator that lost its partition, and what was cut or dropped.
    """
    groups_of: dict[Node, list[Sequence[Node]]] = {}
    for group in map(list, groups):
        for node in group:
            groups_of.setdefault(node, []).append(group)
    work = _Work(limits, scope, by, groups_of)
    with collector.paused():
        kept = [piece for proposal in proposals for piece in work.cut(proposal)]
        kept = work.drop_small(kept)
        kept = work.drop_losses(kept)
        kept = work.drop_surplus(kept)
    return kept, work.rejections, work.adjustments


@dataclass(slots=True)
class _Work:
    """The limits of one graph while they are applied, and the rejections and adjustments so far."""

    limits: Limits
    scope: GraphScope
    by: str
    groups_of: Mapping[Node, Sequence[Sequence[Node]]]  # those that each node is in
    rejections: list[Rejection] = field(default_factory=list)
    adjustments: list[Adjustment] = field(default_factory=list)

    # -- too large -----------------------------------------------------------------------------------------------------

    def cut(self, proposal: Proposal) -> list[Proposal]:
        """Cut a proposal that exceeds a limit, and drop what exceeds one by itself."""
        over = self._describe_excess(proposal.nodes)
        if not over:
            return [proposal]
        units = _list_units(proposal.nodes, self.groups_of)
        left: dict[Node, str] = {}
        for unit in units:
            alone = self._describe_excess(unit)
            if alone:
                what = "one operator" if len(_list_operators(unit)) == 1 else "a group that must stay together"
                self._drop(unit, f"{alone} ({what})", "over_capacity")
            else:
                left.update(dict.fromkeys(unit, proposal.backend))
        pieces = [proposal] if len(left) == len(proposal.nodes) else contract(proposal.nodes, left, groups=units)
        pieces = [smaller for piece in pieces for smaller in self._cut_whole(piece, units)]
        if len(pieces) > 1:
            crossing = _count_crossing(proposal.nodes, pieces, self.scope)
            self._adjust(
                "cut", proposal.nodes, f"{over}: cut into {len(pieces):,}, {_format_count(crossing, 'byte')} cross"
            )
        return pieces

    def _describe_excess(self, nodes: Sequence[Node]) -> str:
        """Describe which limits nodes exceed, with the figures; "" for none."""
        limits, found = self.limits, []
        if limits.max_nodes is not None and len(_list_operators(nodes)) > limits.max_nodes:
            found.append(f"{_format_count(len(_list_operators(nodes)), 'operator')}, max_nodes={limits.max_nodes:,}")
        if limits.max_weight_bytes is not None:
            held = sum(measures.value_bytes(node) for node in _list_constants(nodes, self.scope))
            if held > limits.max_weight_bytes:
                found.append(f"{_format_count(held, 'byte')} of weights, max_weight_bytes={limits.max_weight_bytes:,}")
        return " and ".join(found)

    def _cut_whole(self, proposal: Proposal, units: Sequence[Sequence[Node]]) -> list[Proposal]:
        """Cut a proposal none of whose units exceeds a limit."""
        if not self._describe_excess(proposal.nodes):
            return [proposal]
        inside = set(proposal.nodes)
        vertices = [unit for unit in units if unit[0] in inside]
        piece_of = _make_problem(proposal.nodes, vertices, self.limits, self.scope).cut()
        number = {node: piece for unit, piece in zip(vertices, piece_of, strict=True) for node in unit}
        members: list[list[Node]] = [[] for _ in range(max(piece_of) + 1)]
        for node in proposal.nodes:
            members[number[node]].append(node)
        return [Proposal(proposal.backend, tuple(nodes)) for nodes in members]

    # -- too small, too many -------------------------------------------------------------------------------------------

    def drop_small(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        """Drop what is too small, unless it is the whole graph."""
        limits, kept = self.limits, []
        whole = len(_list_operators(list_computing(self.scope.graph_module)))
        for proposal in proposals:
            operators, found = len(_list_operators(proposal.nodes)), []
            if operators < limits.min_nodes:
                found.append(f"{_format_count(operators, 'operator')}, min_nodes={limits.min_nodes:,}")
            if limits.min_flops and (flops := _count_flops(proposal)) < limits.min_flops:
                found.append(f"{_format_count(flops, 'floating-point operation')}, min_flops={limits.min_flops:,}")
            if found and (operators < whole or not operators):
                self._drop(proposal.nodes, " and ".join(found), "dropped")
            else:
                kept.append(proposal)
        return kept

    def drop_losses(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        """Drop what saves too little, in topological order: values that it shares with others move then."""
        least, kept = self.limits.min_gain, []
        if least is None:
            return list(proposals)
        gains = Gains(self.scope, proposals)
        for proposal in proposals:
            here, there = gains.compare(proposal)
            if here - there >= least:
                kept.append(proposal)
                continue
            gains.drop(proposal)
            seconds = f"{here * 1e6:,.2f} us on the host, {there * 1e6:,.2f} us in {proposal.backend} with its call"
            reason = f"{seconds} and its data, as predicted; min_gain={least * 1e6:,.2f} us"
            self._drop(proposal.nodes, reason, "cost")
        return kept

    def drop_surplus(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        """Keep as many as allowed: those with the most work, then with the most operators, then the first ones."""
        most = self.limits.max_partitions
        if most is None or len(proposals) <= most:
            return list(proposals)
        work = [(_count_flops(proposal), len(_list_operators(proposal.nodes))) for proposal in proposals]
        ranked = sorted(range(len(proposals)), key=lambda i: (-work[i][0], -work[i][1], i))
        rank = {i: number for number, i in enumerate(ranked, 1)}
        kept = []
        for i, proposal in enumerate(proposals):
            if rank[i] <= most:
                kept.append(proposal)
                continue
            flops, operators = work[i]
            self._drop(
                proposal.nodes,
                f"number {rank[i]:,} of {len(proposals):,} partitions by work, max_partitions={most:,}: "
                f"{_format_count(flops, 'floating-point operation')}, {_format_count(operators, 'operator')}",
                "dropped",
            )
        return kept

    # -- what is said --------------------------------------------------------------------------------------------------

    def _drop(self, nodes: Sequence[Node], reason: str, code: str) -> None:
        self._adjust("dropped", nodes, reason)
        text = reason if code == "over_capacity" else f"its partition was dropped: {reason}"
        self.rejections += [
            Rejection("", self._name(node), graphs.operator_name(node), text, self.by, code)
            for node in _list_operators(nodes)
        ]

    def _adjust(self, kind: Literal["dropped", "cut"], nodes: Sequence[Node], reason: str) -> None:
        self.adjustments.append(Adjustment("", kind, tuple(map(self._name, nodes)), reason, self.by))

    def _name(self, node: Node) -> str:
        return graphs.qualified_name(self.scope.path, node)


# -- figures -----------------------------------------------------------------------------------------------------------


def _list_operators(nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if not graphs.is_getitem(node)]


def _list_constants(nodes: Iterable[Node], scope: GraphScope) -> dict[Node, None]:
    """Return the constants that nodes read, each once, in the order of their first use."""
    return {source: None for node in nodes for source in node.all_input_nodes if source in scope.constants}


def _count_flops(proposal: Proposal) -> int:
    return sum(measures.flops(node) for node in proposal.nodes)


def _format_count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _count_crossing(nodes: Sequence[Node], pieces: Sequence[Proposal], scope: GraphScope) -> int:
    """Return the bytes that cross, of values from outside from the second piece on; each piece has its constants."""
    piece_of = {node: number for number, piece in enumerate(pieces) for node in piece.nodes}
    makers = {node: piece_of.get(node, len(pieces)) for node in nodes}
    return cuts.count_crossing(_list_nets(piece_of, makers, scope), range(len(pieces) + 1))


# -- the graph of what is never cut ------------------------------------------------------------------------------------


def _list_units(nodes: Sequence[Node], groups_of: Mapping[Node, Sequence[Sequence[Node]]]) -> list[tuple[Node, ...]]:
    """Return what is never cut, in topological order: an operator with its getitems, a group, groups on a cycle."""
    together = Together(nodes)
    joined = [together.join(group) for node in nodes for group in groups_of.get(node, ())]
    if any(joined):
        together.close()
    tag_of = {node: str(number) for number, unit in enumerate(together.members().values()) for node in unit}
    return [unit.nodes for unit in quotient.order(nodes, tag_of, explain=False)[0]]


def _list_nets(
    readers: Mapping[Node, int], makers: Mapping[Node, int], scope: GraphScope
) -> list[tuple[int, tuple[int, ...]]]:
    """Return each value that is read, with its bytes and the vertices that make or read it."""
    pins: dict[Node, dict[int, None]] = {}
    for node, vertex in readers.items():
        for source in node.all_input_nodes:
            if source not in scope.constants:
                found = pins.setdefault(source, {makers[source]: None} if source in makers else {})
                found[vertex] = None
    return [(measures.value_bytes(node), tuple(found)) for node, found in pins.items()]


def _make_problem(
    nodes: Sequence[Node], vertices: Sequence[Sequence[Node]], limits: Limits, scope: GraphScope
) -> cuts.CutProblem:
    vertex_of = {node: vertex for vertex, members in enumerate(vertices) for node in members}
    following: list[dict[int, None]] = [{} for _ in vertices]
    for node in nodes:
        for user in node.users:
            if user in vertex_of and vertex_of[user] != vertex_of[node]:
                following[vertex_of[node]][vertex_of[user]] = None
    number = {constant: i for i, constant in enumerate(_list_constants(nodes, scope))}
    return cuts.CutProblem(
        successors=[tuple(after) for after in following],
        sizes=[len(_list_operators(members)) for members in vertices],
        weights=[tuple(number[constant] for constant in _list_constants(members, scope)) for members in vertices],
        weight_bytes=[measures.value_bytes(constant) for constant in number],
        nets=_list_nets(vertex_of, vertex_of, scope),
        max_size=limits.max_nodes,
        max_weight_bytes=limits.max_weight_bytes,
    )


# -- what a partition saves, as a plan would predict it ----------------------------------------------------------------

_OTHER = "a delegate of another partitioner"


class Gains:
    """The places of a graph's nodes and of the readers of each value, while proposals go back to the host."""

    def __init__(self, scope: GraphScope, proposals: Sequence[Proposal]) -> None:
        self._scope, self._costs = scope, planned_costs()
        computing = list_computing(scope.graph_module)
        self._place_of = {node: _OTHER for node in computing if _is_of_delegate(node)}
        self._place_of.update((node, each.backend) for each in proposals for node in each.nodes)
        self._places_of_readers = {
            node: Counter(self._place(user) for user in node.users)
            for node in scope.graph_module.graph.nodes
            if node not in scope.constants
        }

    def _place(self, node: Node) -> str:
        return self._place_of.get(node, HOST)

    def compare(self, proposal: Proposal) -> tuple[float, float]:
        """Return the seconds of a proposal on the host, and in its backend with the call; both with moving data."""
        module, costs, backend = self._scope.graph_module, self._costs, proposal.backend
        here = costs.nodes(module, proposal.nodes, HOST)
        there = costs.nodes(module, proposal.nodes, backend) + costs.call(backend)
        inside = set(proposal.nodes)
        for value, readers in self._count_readers(proposal).items():
            moved = measures.value_bytes(value) * costs.per_byte
            known = self._places_of_readers[value]
            hosted = known + Counter({HOST: readers})
            hosted[backend] -= readers
            there += moved * _count_other(known, self._place(value))
            here += moved * _count_other(hosted, HOST if value in inside else self._place(value))
        return here, there

    def drop(self, proposal: Proposal) -> None:
        """Leave a proposal on the host."""
        for value, readers in self._count_readers(proposal).items():
            self._places_of_readers[value].update({HOST: readers, proposal.backend: -readers})
        for node in proposal.nodes:
            del self._place_of[node]

    def _count_readers(self, proposal: Proposal) -> dict[Node, int]:
        """Return how many nodes of a proposal read each value that the proposal makes or reads, without constants."""
        found = dict.fromkeys(proposal.nodes, 0)
        for node in proposal.nodes:
            for source in node.all_input_nodes:
                if source in self._places_of_readers:
                    found[source] = found.get(source, 0) + 1
        return found


def _is_of_delegate(node: Node) -> bool:
    made = node.args[0] if graphs.is_getitem(node) else node
    return isinstance(made, Node) and graphs.is_delegate_call(made)


def _count_other(readers: Counter[str], own: str) -> int:
    return sum(count > 0 and place != own for place, count in readers.items())
