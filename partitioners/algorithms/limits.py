"""Fragmentation and capacity: which proposals are too small to be worth a call, and which are too large for one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import networkx as nx
from torch.fx import Node

from exir_lowering import Adjustment, InputError, Rejection, graphs
from exir_lowering.graphs import collector, measures
from exir_lowering.partitioners.algorithms.convex import (
    Proposal,
    contract,
    find_knots,
    join_results,
    list_computing,
    order_units,
)
from exir_lowering.partitioners.supports.support import GraphScope


@dataclass(frozen=True, slots=True)
class Limits:
    """How small and how large a partition may be.

    Attributes:
        min_nodes: A partition with fewer operators is dropped, unless it is the whole graph.
        min_flops: A partition with fewer floating-point operations is dropped, unless it is the whole graph.
        max_partitions: How many partitions a graph keeps: those with the most floating-point operations.
        max_nodes: A partition with more operators is cut: each piece takes the next operators while they fit.
        max_weight_bytes: A partition with more bytes of parameters, buffers and constants is also cut. Those from which
            alone an input is computed count too, such as the weight behind a transposed one.

    Raises:
        InputError: A limit is not a number, is out of range, or leaves no size between `min_nodes` and `max_nodes`.
    """

    min_nodes: int = 1
    min_flops: int = 0
    max_partitions: int | None = None
    max_nodes: int | None = None
    max_weight_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value, optional = getattr(self, name), least > 0
            if not (value is None and optional) and (type(value) is not int or value < least):
                none = ", or None for no limit" if optional else ""
                raise InputError(f"Limits({name}={value!r}): expected an integer, {least} or more{none}.")
        if self.max_nodes is not None and self.min_nodes > self.max_nodes:
            raise InputError(
                f"Limits(min_nodes={self.min_nodes}, max_nodes={self.max_nodes}): no partition can have at least "
                f"min_nodes and at most max_nodes operators. Expected min_nodes of at most {self.max_nodes}."
            )


_END = -1  # stands for who reads what is read by no vertex of a proposal

_LEAST = {"min_nodes": 0, "min_flops": 0, "max_partitions": 1, "max_nodes": 1, "max_weight_bytes": 1}


def apply(
    proposals: Sequence[Proposal], limits: Limits, scope: GraphScope, *, groups: Iterable[Iterable[Node]] = (), by: str
) -> tuple[list[Proposal], list[Rejection], list[Adjustment]]:
    """Cut what is too large, drop what is too small, then what is too many; return what is left, and why."""
    groups_of: dict[Node, list[Sequence[Node]]] = {}
    for group in map(list, groups):
        for node in group:
            groups_of.setdefault(node, []).append(group)
    work = _Work(limits, scope, by, groups_of)
    with collector.paused():
        kept = [piece for proposal in proposals for piece in work.cut(proposal)]
        kept = work.drop_small(kept)
        kept = work.drop_surplus(kept)
    return kept, work.rejections, work.adjustments


@dataclass(slots=True)
class _Work:
    """The limits of one graph while they are applied, and the rejections and adjustments so far."""

    limits: Limits
    scope: GraphScope
    by: str
    groups_of: Mapping[Node, Sequence[Sequence[Node]]]  # those that each node is in
    behind: dict[Node, tuple[Node, ...]] | None = None  # the constants of which alone a value is made
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
            self._adjust("cut", proposal.nodes, f"{over}: cut into {len(pieces):,}")
        return pieces

    def _describe_excess(self, nodes: Sequence[Node]) -> str:
        """Describe which limits nodes exceed, with the figures; "" for none."""
        limits, found = self.limits, []
        if limits.max_nodes is not None and len(_list_operators(nodes)) > limits.max_nodes:
            found.append(f"{_format_count(len(_list_operators(nodes)), 'operator')}, max_nodes={limits.max_nodes:,}")
        if limits.max_weight_bytes is not None:
            held = sum(measures.value_bytes(node) for node in self._list_constants(nodes))
            if held > limits.max_weight_bytes:
                found.append(f"{_format_count(held, 'byte')} of weights, max_weight_bytes={limits.max_weight_bytes:,}")
        return " and ".join(found)

    def _list_constants(self, nodes: Iterable[Node]) -> dict[Node, None]:
        """Return the constants that nodes read, each once, in the order of their first use."""
        if self.limits.max_weight_bytes is None:
            return {}
        if self.behind is None:
            self.behind = {node: (node,) for node in self.scope.constants}
            for node in list_computing(self.scope.graph_module):
                sources = node.all_input_nodes
                if sources and all(source in self.behind for source in sources):
                    made = dict.fromkeys(one for source in sources for one in self.behind[source])
                    if measures.value_bytes(node) >= sum(map(measures.value_bytes, made)):  # it is not a part of them
                        self.behind[node] = tuple(made)
        read = (source for node in nodes for source in node.all_input_nodes)
        return {one: None for source in read for one in self.behind.get(source, ())}

    def _cut_whole(self, proposal: Proposal, units: Sequence[Sequence[Node]]) -> list[Proposal]:
        """Cut a proposal whose units fit: each piece takes what fits and comes next, what a result needs before it."""
        if not self._describe_excess(proposal.nodes):
            return [proposal]
        inside, limits = set(proposal.nodes), self.limits
        vertices = [unit for unit in units if unit[0] in inside]
        vertex_of = {node: vertex for vertex, unit in enumerate(vertices) for node in unit}
        needs = nx.DiGraph()
        for vertex, unit in enumerate(vertices):
            readers = {vertex_of[user] for node in unit for user in node.users if user in vertex_of} - {vertex}
            needs.add_edges_from((reader, vertex) for reader in readers or (_END,))
        piece_of: dict[Node, int] = {}
        read: set[Node] = set()
        piece = size = held = 0
        for unit in (vertices[vertex] for vertex in list(nx.dfs_postorder_nodes(needs, _END))[:-1]):
            operators, constants = len(_list_operators(unit)), self._list_constants(unit)
            more = sum(measures.value_bytes(constant) for constant in constants if constant not in read)
            over = limits.max_nodes is not None and size + operators > limits.max_nodes
            if over or (limits.max_weight_bytes is not None and held + more > limits.max_weight_bytes):
                piece, size, held, read = piece + 1, 0, 0, set()
                more = sum(map(measures.value_bytes, constants))
            size, held = size + operators, held + more
            read.update(constants)
            piece_of.update(dict.fromkeys(unit, piece))
        members: list[list[Node]] = [[] for _ in range(piece + 1)]
        for node in proposal.nodes:
            members[piece_of[node]].append(node)
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


def _count_flops(proposal: Proposal) -> int:
    return sum(measures.flops(node) for node in proposal.nodes)


def _format_count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


# -- the graph of what is never cut ------------------------------------------------------------------------------------


def _list_units(nodes: Sequence[Node], groups_of: Mapping[Node, Sequence[Sequence[Node]]]) -> list[list[Node]]:
    """Return what is never cut, in topological order: an operator with its getitems, a group, groups on a cycle."""
    sets, inside = join_results(nodes), frozenset(nodes)
    groups = {id(group): group for node in nodes for group in groups_of.get(node, ())}
    for group in groups.values():
        sets.union(*inside.intersection(group))
    for knot in find_knots(nodes, sets) if groups else ():
        sets.union(*knot)
    return order_units(nodes, sets)[0]
