"""Propose partitions: the fewest convex ones for one backend, in time linear in nodes and edges.

A partition is convex if no path leaves it and comes back; all proposed partitions can be contracted at once, and the
graph stays acyclic. What must stay together is one vertex: a node and the getitems that pick its results, and the
groups that the caller gives. `schedule` then assigns the vertices.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch.fx import GraphModule, Node

from exir_lowering import InputError, graphs
from exir_lowering.graphs import collector, measures, quotient
from exir_lowering.graphs.order import topological
from exir_lowering.graphs.schedule import Dag, schedule
from exir_lowering.graphs.together import Sets, Together
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
    """Propose convex partitions of one graph; contracting all of them leaves it acyclic.

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

    Returns:
        The partitions in topological order.

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
        whole = _select_whole_groups(own, able)
        accepted += whole
        label_of.update((node, name) for node in nodes if node in able)
    return contract(nodes, label_of, groups=accepted, keep_apart=keep_apart)


def _select_whole_groups(groups: Sequence[Sequence[Node]], able: set[Node]) -> list[list[Node]]:
    """Return the groups that one backend can take whole; the nodes of other groups are removed from `able`."""
    groups_of: dict[Node, list[int]] = {}
    for number, group in enumerate(groups):
        for node in group:
            groups_of.setdefault(node, []).append(number)
    broken = {number for number, group in enumerate(groups) if not able.issuperset(group)}
    pending = list(broken)
    while pending:  # what a broken group removes may break others that share a node with it
        for node in groups[pending.pop()]:
            able.discard(node)
            more = [number for number in groups_of[node] if number not in broken]
            broken.update(more)
            pending += more
    return [list(group) for number, group in enumerate(groups) if number not in broken]


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
    """Propose partitions of nodes whose backends are known; otherwise the same as `propose_partitions`.

    Args:
        nodes: The computing nodes of one graph, in graph order.
        label_of: The backend of each supported node; getitems need none.
        groups: Nodes that must stay together.
        keep_apart: Whether parts that share no edge are kept apart.

    Returns:
        The partitions, as few as it can find.
    """
    with collector.paused():
        units, dag = _contract_nodes(nodes, label_of, groups)
        epochs = schedule(dag)
    if keep_apart:  # each partition falls into the parts that share an edge
        parts = Sets(len(epochs))
        for vertex, epoch in enumerate(epochs):
            for after in dag.successors[vertex] if epoch else ():
                if epochs[after] == epoch:
                    parts.join(vertex, after)
        found = [(epoch, parts.find(vertex)) if epoch else None for vertex, epoch in enumerate(epochs)]
        number = {part: i for i, part in enumerate(sorted({part for part in found if part is not None}), 1)}
        epochs = [0 if part is None else number[part] for part in found]
    labels = {epoch: label for label, epoch in zip(dag.labels, epochs, strict=True) if epoch}
    epoch_of = {node: epoch for unit, epoch in zip(units, epochs, strict=True) for node in unit}
    members: dict[int, list[Node]] = {epoch: [] for epoch in sorted(labels)}
    for node in nodes:
        if epoch_of[node]:
            members[epoch_of[node]].append(node)
    return [Proposal(labels[epoch] or "", tuple(inside)) for epoch, inside in members.items()]


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


def _contract_nodes(
    nodes: Sequence[Node], label_of: Mapping[Node, str], groups: Iterable[Iterable[Node]]
) -> tuple[list[list[Node]], Dag]:
    """Return the nodes of each vertex, and the graph that the vertices make.

    The nodes of a group that one backend takes whole are joined, and what is on a cycle of such groups; the nodes of
    other groups are left to the host.
    """
    together, grouped = Together(nodes), Sets(len(nodes))
    found = False
    for number, group in enumerate(groups):
        places = [together.place[node] for node in list_group_operators(number, group, together.place)]
        for other in places[1:]:
            grouped.join(places[0], other)
            found = True
    if not found:
        return _number(label_of, together)
    members: dict[int, list[Node]] = {}
    for i, node in enumerate(nodes):
        members.setdefault(grouped.find(i), []).append(node)
    left = dict(label_of)
    for joined in members.values():
        labels = {label_of.get(node) for node in joined if not _follows(node)}
        if len(labels) == 1 and None not in labels:
            together.join(joined)
        elif len(joined) > 1:
            for node in joined:
                left.pop(node, None)
    for knot in together.knots():
        inside = [node for node in nodes if together.find(node) in knot]
        labels = {left.get(node) for node in inside if not _follows(node)}
        if len(labels) > 1 or None in labels:
            raise _describe_nonconvex(left, together, knot)
        together.join(inside)
    return _number(left, together)


def _describe_nonconvex(label_of: Mapping[Node, str], together: Together, knot: Container[int]) -> InputError:
    members = together.members()
    tag_of = {
        node: f"group at {group[0].name}"
        for root, group in members.items()
        if root in knot and len(group) > 1
        for node in group
    }
    _, cycles = quotient.order(together.nodes, tag_of, explain=True)
    between = [node.name for node in together.nodes if together.find(node) in knot and node not in label_of]
    why = f" Node {between[0]} on it is not supported." if between else " The nodes on it go to different backends."
    return InputError(
        f"A group of nodes that must stay together is not convex: the path {cycles[0]} leaves the {cycles[0].tag} and "
        f"comes back.{why} Remove one of the group's nodes, or support the nodes on the path too."
    )


def _number(label_of: Mapping[Node, str], together: Together) -> tuple[list[list[Node]], Dag]:
    """Number the vertices in topological order, keeping the graph's order where possible."""
    members = together.members()
    rank = {root: i for i, root in enumerate(members)}
    successors = [[rank[other] for other in following] for following in together.successors().values()]
    order = topological(successors)
    number = [0] * len(order)
    for i, vertex in enumerate(order):
        number[vertex] = i
    after = [[number[other] for other in successors[vertex]] for vertex in order]
    groups = list(members.values())
    units = [groups[vertex] for vertex in order]
    before: list[list[int]] = [[] for _ in order]
    for i, numbers in enumerate(after):
        for other in numbers:
            before[other].append(i)
    found = [{label_of.get(node) for node in unit if not _follows(node)} for unit in units]
    labels = [each.pop() if len(each) == 1 else None for each in found]

    @cache
    def size(unit: int) -> int:
        inside = set(units[unit])
        return sum(measures.value_bytes(node) for node in units[unit] if not inside.issuperset(node.users)) or 1

    def is_returned(unit: int) -> bool:
        return any(user.op == "output" for node in units[unit] for user in node.users)

    return units, Dag(before, after, labels, size, is_returned)
