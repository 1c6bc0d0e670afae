"""The quotient graph: each partition contracted to one vertex, ordered; those that close a cycle are split."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx
import torch
from torch.fx import Node

from exir_lowering.errors import InvariantError
from exir_lowering.graphs.order import topological

Piece = tuple[str, int]
"""A tag and the number of its convex piece."""

_ATEN = torch.ops.aten
_SORTED_FIRST = frozenset(
    {
        *(operator.add, operator.mul, operator.sub, operator.floordiv, operator.truediv, operator.mod),
        *(operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne),
        *(_ATEN.sym_constrain_range.default, _ATEN.sym_constrain_range_for_size.default, _ATEN.scalar_tensor.default),
        *(torch.ops.aten._assert_async.msg, torch.ops.aten._assert_scalar.default),
    }
)
"""Run-time assertions and arithmetic on sizes, which `legalize_graph` sorts before what depends on data."""

_MERGE_LIMIT = 64  # the largest number of pieces in a component for which merging back is tried: each trial searches it


@dataclass(frozen=True, slots=True)
class Unit:
    """A vertex of the quotient graph: a host node, or all nodes of a piece, in graph order."""

    piece: Piece | None
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Cycle:
    """A path out of a tag and back into it, by the names of its nodes; the first and the last one have the tag."""

    tag: str
    path: tuple[str, ...]

    def __str__(self) -> str:
        return " -> ".join(self.path)


def contract(nodes: Sequence[Node], key: Callable[[Node], Hashable]) -> tuple[list[list[Node]], list[list[int]]]:
    """Return the nodes with one key as vertices, in the given order, and the vertices that read the results of each."""
    members: dict[Hashable, list[Node]] = {}
    for node in nodes:
        members.setdefault(key(node), []).append(node)
    number = {node: i for i, inside in enumerate(members.values()) for node in inside}
    readers = ((number.get(user) for node in inside for user in node.users) for inside in members.values())
    successors = [[j for j in dict.fromkeys(found) if j not in (None, i)] for i, found in enumerate(readers)]
    return list(members.values()), successors  # type: ignore[return-value]


def find_knots(successors: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the strongly connected components of several vertices: together these are convex, alone they are not."""
    graph = nx.DiGraph([(i, j) for i, following in enumerate(successors) for j in following])
    return [sorted(component) for component in nx.strongly_connected_components(graph) if len(component) > 1]


def order(nodes: Sequence[Node], tag_of: Mapping[Node, str]) -> tuple[list[Unit], Cycle | None]:
    """Contract tags to units and order these as the graph is, splitting tags that would close the returned cycle."""
    piece_of = {node: (tag, 0) for node, tag in tag_of.items()}
    units, stuck = _kahn(nodes, piece_of)
    if not stuck:
        return units, None
    cycle = _split(stuck, piece_of)
    units, stuck = _kahn(nodes, piece_of)
    if stuck:
        names = sorted(node.name for node in stuck)[:8]
        raise InvariantError(f"Splitting tags into levels left a cycle through {names}. Please report this program.")
    return units, cycle


def breadth_first(nodes: Sequence[Node]) -> dict[Node, int]:
    """Return each node's position in the order of `torch.fx`'s `legalize_graph`, by which ExecuTorch sorts a graph.

    It does so after taking out a partition. If partitioners number their tags from the end of the graph, as torch.fx's
    partitioner does, one such sort gives the same order for all partitions but the first, and so the same payloads.
    """
    number = {node: i for i, node in enumerate(nodes)}
    urgent = [node.target in _SORTED_FIRST and bool(node.all_input_nodes) for node in nodes]
    ordered = topological([[number[user] for user in node.users] for node in nodes], urgent.__getitem__)
    return {nodes[vertex]: place for place, vertex in enumerate(ordered)}


def _kahn(nodes: Sequence[Node], piece_of: Mapping[Node, Piece]) -> tuple[list[Unit], list[Node]]:
    """Return the units that can be ordered, and the nodes of the others."""
    units, successors = contract(nodes, lambda node: piece_of.get(node, node))
    ordered = topological(successors)
    left = {node for i in set(range(len(units))).difference(ordered) for node in units[i]}
    return [Unit(piece_of.get(units[i][0]), tuple(units[i])) for i in ordered], [n for n in nodes if n in left]


def _split(nodes: Sequence[Node], piece_of: dict[Node, Piece]) -> Cycle:
    """Split the tags of each strongly connected component into levels in `piece_of`; return a cycle as it was before.

    A level rises with each entry into a tag from outside. Every edge inside the component keeps or raises it, and
    entering a tag raises it. So no cycle of pieces remains: it would have to enter a piece and return to the level that
    it left.
    """
    units, successors = contract(nodes, lambda node: piece_of.get(node, node))
    position = {node: i for i, node in enumerate(nodes)}
    components = sorted(find_knots(successors))
    cycle = _describe_cycle(components[0], units, successors, piece_of)
    for component in components:
        members = sorted((node for i in component for node in units[i]), key=position.__getitem__)
        level: dict[Node, int] = {}
        for node in members:
            tag = piece_of[node][0] if node in piece_of else None
            level[node] = 0
            for source in node.all_input_nodes:
                if source in level:
                    same = tag is None or (source in piece_of and piece_of[source][0] == tag)
                    level[node] = max(level[node], level[source] + (not same))
        claimed = [node for node in members if node in piece_of]
        piece_of.update({node: (piece_of[node][0], level[node]) for node in claimed})
        _merge_back(members, claimed, piece_of)
        levels: dict[str, set[int]] = {}
        for node in claimed:
            levels.setdefault(piece_of[node][0], set()).add(piece_of[node][1])
        number = {(tag, level): i for tag, found in levels.items() for i, level in enumerate(sorted(found))}
        piece_of.update({node: (piece_of[node][0], number[piece_of[node]]) for node in claimed})
    return cycle


def _merge_back(members: Sequence[Node], claimed: Sequence[Node], piece_of: dict[Node, Piece]) -> None:
    """Merge neighbouring pieces of a tag again if that closes no cycle: levels split more than necessary."""
    pieces = list(dict.fromkeys(piece_of[node] for node in claimed))
    for tag in dict.fromkeys(piece[0] for piece in pieces) if len(pieces) <= _MERGE_LIMIT else ():
        kept, *levels = sorted(piece[1] for piece in pieces if piece[0] == tag)
        for level in levels:
            trial = {n: (tag, kept) if piece_of[n] == (tag, level) else piece_of[n] for n in claimed}
            if _kahn(members, trial)[1]:
                kept = level
            else:
                piece_of.update(trial)


def _describe_cycle(
    component: Sequence[int],
    units: Sequence[Sequence[Node]],
    successors: Sequence[Sequence[int]],
    piece_of: Mapping[Node, Piece],
) -> Cycle:
    """Describe the shortest cycle through the first tag of a component, by the nodes where it leaves or enters one."""
    inside = frozenset(component)
    graph = nx.DiGraph([(i, j) for i in component for j in successors[i] if j in inside])
    start = next(i for i in component if units[i][0] in piece_of)
    steps = nx.single_source_shortest_path_length(graph.reverse(copy=False), start)
    following = min(graph.successors(start), key=lambda j: (steps[j], j))
    names: list[str] = []
    for one, other in pairwise([start, *nx.shortest_path(graph, following, start)]):
        target = set(units[other])
        source, user = next((n, u) for n in units[one] for u in n.users if u in target)
        names += [name for name in (source.name, user.name) if not names or names[-1] != name]
    return Cycle(piece_of[units[start][0]][0], tuple(names))
