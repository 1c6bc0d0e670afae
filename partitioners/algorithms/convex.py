"""Propose partitions: the fewest convex ones for one backend, in time linear in nodes and edges.

A partition is convex if no path leaves it and comes back; all proposed partitions can be contracted at once, and the
graph stays acyclic. What must stay together is one vertex: a node and the getitems that pick its results, and the
groups that the caller gives. The backends take their partitions one after the other, each the fewest for it.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from networkx.utils import UnionFind
from torch.fx import GraphModule, Node

from exir_lowering import InputError, graphs
from exir_lowering.graphs import collector, measures, quotient
from exir_lowering.graphs.order import topological
from exir_lowering.graphs.schedule import schedule
from exir_lowering.partitioners.supports.support import GraphScope, SupportLike, as_support, make_check

_NOT_COMPUTING = ("placeholder", "get_attr", "output")


@dataclass(frozen=True, slots=True)
class Proposal:
    """A convex set of nodes for one backend.

    Attributes:
        backend: The key of the support that took the nodes, "" for a single support without a key.
        nodes: The nodes in graph order, getitems of their results included, constants not.
    """

    backend: str
    nodes: tuple[Node, ...]


def propose_partitions(
    graph_module: GraphModule | GraphScope,
    support: SupportLike | Mapping[str, SupportLike],
    *,
    groups: Iterable[Iterable[Node]] = (),
    keep_apart: bool = False,
) -> list[Proposal]:
    """Return convex partitions of one graph, in topological order; contracting all of them leaves it acyclic.

    For one backend there is no acyclic contraction with fewer partitions (as long as `keep_apart` is off); for several
    it is an approximation. Each partition has at least one computing operator; getitem follows its producer, and
    get_attr and constants are left to their users. Linear in nodes and edges, deterministic.

    Args:
        graph_module: The graph, or a `GraphScope` with what is known of its constants. Graphs nested in it are not
            processed; `graphs.walk` yields them.
        support: What is supported: a `Support`, a torch.fx `OperatorSupportBase`, a function from a node to a bool,
            or a mapping from backends to these, where the first one that takes a node gets it.
        groups: Nodes that must stay together, a getitem standing for its producer. A group goes to the first backend
            that takes all of it; if none does, none of it is proposed. Groups of a support are that backend's only.
        keep_apart: Whether parts of a partition that share no edge become separate partitions.

    Raises:
        InputError: A group cannot be convex (the path is shown), or has nodes that are not in the graph.
        PartitionerContractError: A support raised.
    """
    scope = graph_module if isinstance(graph_module, GraphScope) else GraphScope(graph_module)
    supports = support if isinstance(support, Mapping) else {"": support}
    bound = [(name, as_support(candidate)) for name, candidate in supports.items()]
    nodes = list_computing(scope.graph_module)
    known = frozenset(nodes)
    free = [node for node in nodes if not _follows(node) and not graphs.is_delegate_call(node)]
    together = [list_group_operators(number, group, known) for number, group in enumerate(groups)]
    label_of: dict[Node, str] = {}
    accepted: list[list[Node]] = []
    for name, candidate in bound:
        check = make_check(candidate, scope)
        able = {node for node in free if node not in label_of and check(node) is None}
        own = [*together, *(list_group_operators(i, group, known) for i, group in enumerate(candidate.groups(scope)))]
        # What a group leaves that cannot be taken whole may be in others.
        groups_of: dict[Node, list[list[Node]]] = {}
        for group in own:
            for node in group:
                groups_of.setdefault(node, []).append(group)
        broken = [group for group in own if not able.issuperset(group)]
        while broken:
            for node in able.intersection(broken.pop()):
                able.remove(node)
                broken += groups_of[node]
        accepted += [group for group in own if able.issuperset(group)]
        label_of.update((node, name) for node in nodes if node in able)
    return contract(nodes, label_of, groups=accepted, keep_apart=keep_apart)


def list_computing(graph_module: GraphModule) -> list[Node]:
    """Return the nodes of a graph that can be in a partition: all but inputs, constants and the output."""
    return [node for node in graph_module.graph.nodes if node.op not in _NOT_COMPUTING]


def contract(
    nodes: Sequence[Node],
    label_of: Mapping[Node, str],
    *,
    groups: Iterable[Iterable[Node]] = (),
    keep_apart: bool = False,
) -> list[Proposal]:
    """Return as few partitions as it can find of nodes whose backends are known; otherwise as `propose_partitions`.

    Args:
        nodes: The computing nodes of one graph, in graph order.
        label_of: The backend of each supported node; getitems need none.
        groups: Nodes that must stay together.
        keep_apart: Whether parts that share no edge are kept apart.
    """
    with collector.paused():
        label_of, sets = _join_groups(nodes, label_of, groups)
        units, before = order_units(nodes, sets)
        labels = [_label(unit, label_of) for unit in units]
        for label in dict.fromkeys(label_of.values()):
            if labels.count(label) > 1:
                epochs = _schedule(units, before, [each == label for each in labels])
                first: dict[int, int] = {}
                for vertex, epoch in enumerate(epochs):
                    near = before[vertex] if keep_apart else [first.setdefault(epoch, vertex)]
                    joined = [other for other in near if epochs[other] == epoch > 0]
                    sets.union(units[vertex][0], *(units[other][0] for other in joined))
                units, before = order_units(nodes, sets)
                labels = [_label(unit, label_of) for unit in units]
    return [Proposal(label, tuple(unit)) for label, unit in zip(labels, units, strict=True) if label is not None]


def list_group_operators(number: int, group: Iterable[Any], known: Container[Node]) -> list[Node]:
    """Return a group's operators, each once, without constants; InputError if it holds what is no node of the graph."""
    found: dict[Node, None] = {}
    for node in group:
        if not isinstance(node, Node) or (node not in known and node.op not in _NOT_COMPUTING):
            raise InputError(
                f"Group {number} holds {node!r}, which is not a node of the graph. Pass nodes of this graph."
            )
        while _follows(node):
            node = node.args[0]
        if node in known:
            found[node] = None
    return list(found)


# -- what is one vertex ------------------------------------------------------------------------------------------------


def _follows(node: Node) -> bool:
    """Return whether a node goes where its producer goes."""
    producer = node.args[0] if graphs.is_getitem(node) else None
    return isinstance(producer, Node) and producer.op not in _NOT_COMPUTING


def _label(unit: Iterable[Node], label_of: Mapping[Node, str]) -> str | None:
    """Return the backend that all operators of a vertex have; None if it is the host, or there are several."""
    labels = {label_of.get(node) for node in unit if not _follows(node)}
    return labels.pop() if len(labels) == 1 else None


def join_results(nodes: Sequence[Node]) -> Any:
    """Return the sets of what always stays together: each operator with its getitems."""
    sets, inside = UnionFind(nodes), frozenset(nodes)
    for node in nodes:
        if _follows(node) and node.args[0] in inside:
            sets.union(node.args[0], node)
    return sets


def find_knots(nodes: Sequence[Node], sets: Any) -> list[list[Node]]:
    """Return the nodes of sets that are on a cycle of sets, by cycle: together they are convex, alone they are not."""
    units, successors = quotient.contract(nodes, sets.__getitem__)
    return [[node for i in knot for node in units[i]] for knot in quotient.find_knots(successors)]


def order_units(nodes: Sequence[Node], sets: Any) -> tuple[list[list[Node]], list[list[int]]]:
    """Return sets on no cycle in topological order, as in the graph where possible, and what numbers each reads."""
    units, successors = quotient.contract(nodes, sets.__getitem__)
    order = topological(successors)
    number = {vertex: i for i, vertex in enumerate(order)}
    before: list[list[int]] = [[] for _ in order]
    for i, vertex in enumerate(order):
        for other in successors[vertex]:
            before[number[other]].append(i)
    return [units[vertex] for vertex in order], before


def _join_groups(
    nodes: Sequence[Node], label_of: Mapping[Node, str], groups: Iterable[Iterable[Node]]
) -> tuple[Mapping[Node, str], Any]:
    """Return the backends of nodes, without groups that none takes whole, and what stays together: groups, knots."""
    known, grouped, sets = frozenset(nodes), UnionFind(), join_results(nodes)
    for number, group in enumerate(groups):
        grouped.union(*list_group_operators(number, group, known))
    several = [joined for joined in grouped.to_sets() if len(joined) > 1]
    if not several:
        return label_of, sets
    left = dict(label_of)
    for joined in several:
        if _label(joined, label_of) is not None:
            sets.union(*joined)
        else:
            for node in joined:
                left.pop(node, None)
    for knot in find_knots(nodes, sets):
        if _label(knot, left) is None:
            raise _describe_nonconvex(left, nodes, sets, knot)
        sets.union(*knot)
    return left, sets


def _describe_nonconvex(
    label_of: Mapping[Node, str], nodes: Sequence[Node], sets: Any, knot: Collection[Node]
) -> InputError:
    units, _ = quotient.contract([node for node in nodes if node in knot], sets.__getitem__)
    tag_of = {node: f"group at {unit[0].name}" for unit in units if len(unit) > 1 for node in unit}
    _, cycle = quotient.order(nodes, tag_of)
    path = f"the path {cycle} leaves the {cycle.tag} and comes back" if cycle is not None else "it has no order"
    between = [node.name for node in nodes if node in knot and node not in label_of]
    why = f" Node {between[0]} on it is not supported." if between else " The nodes on it go to different backends."
    return InputError(
        f"A group of nodes that must stay together is not convex: {path}.{why} Remove "
        "one of the group's nodes, or support the nodes on the path too."
    )


def _schedule(units: Sequence[Sequence[Node]], before: Sequence[Sequence[int]], claimed: Sequence[bool]) -> list[int]:
    @cache
    def size(unit: int) -> int:
        inside = set(units[unit])
        return sum(measures.value_bytes(node) for node in units[unit] if not inside.issuperset(node.users)) or 1

    def is_returned(unit: int) -> bool:
        return any(user.op == "output" for node in units[unit] for user in node.users)

    return schedule(before, claimed, size, is_returned)
