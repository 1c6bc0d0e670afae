"""The quotient graph: each partition contracted to one vertex, ordered, made acyclic.

The nodes of a tag can only be contracted if no path leaves the tag and comes back, and if no two tags feed each other.
The contracted graph is sorted in O(nodes + edges + units log units). What cannot be sorted lies on a cycle, and only
these strongly connected components are split.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
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

_MERGE_LIMIT = 64
"""The largest number of pieces in a component for which merging back is tried: each trial searches it."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A vertex of the quotient graph: a host node, or all nodes of a piece, in graph order."""

    piece: Piece | None
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Cycle:
    """A path out of a tag and back into it.

    Attributes:
        tag: The tag.
        path: Names of the nodes on the path; the first and the last one have the tag.
    """

    tag: str
    path: tuple[str, ...]

    def __str__(self) -> str:
        return " -> ".join(self.path)


def order(nodes: Sequence[Node], tag_of: Mapping[Node, str], *, explain: bool = True) -> tuple[list[Unit], list[Cycle]]:
    """Contract tags to units and order the units, splitting the tags that would close a cycle.

    Args:
        nodes: The computing nodes of one graph, in graph order.
        tag_of: The tag of each claimed node.
        explain: Whether to find the cycles, which takes a search for each tag on one.

    Returns:
        The units, each after its inputs, and, if `explain`, one cycle for each tag that is on one.
        Units keep the order of the graph where their inputs allow it.
    """
    piece_of = {node: (tag, 0) for node, tag in tag_of.items()}
    units, stuck = _kahn(nodes, piece_of)
    if not stuck:
        return units, []
    cycles = _split(nodes, piece_of, stuck, explain)
    units, stuck = _kahn(nodes, piece_of)
    if stuck:
        raise InvariantError(
            "Splitting tags into levels left a cycle through "
            f"{sorted(node.name for unit in stuck for node in unit.nodes)[:8]}. Please report this program."
        )
    return units, cycles


def breadth_first(nodes: Sequence[Node]) -> dict[Node, int]:
    """Return each node's position in the breadth-first topological order in which ExecuTorch leaves a graph.

    ExecuTorch sorts the graph like this (`torch.fx`'s `legalize_graph`) after taking out a partition, and this decides
    the order in which a backend sees its nodes. If partitioners number their tags from the end of the graph, as
    torch.fx's partitioner does, one such sort gives the same order for all partitions but the first, so that payloads
    are identical byte for byte.

    Args:
        nodes: Every node of a graph, in graph order.
    """
    number = {node: i for i, node in enumerate(nodes)}
    ordered = topological([[number[user] for user in node.users] for node in nodes], _FirstReady(nodes))
    return {nodes[vertex]: place for place, vertex in enumerate(ordered)}


class _FirstReady:
    """Takes nodes in the order in which they become ready, except that those of `_SORTED_FIRST` come first."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._queue: deque[int] = deque()

    def push(self, vertex: int) -> None:
        node = self._nodes[vertex]
        first = node.target in _SORTED_FIRST and bool(node.all_input_nodes)
        (self._queue.appendleft if first else self._queue.append)(vertex)

    def pop(self) -> int:
        return self._queue.popleft()

    def __len__(self) -> int:
        return len(self._queue)


def _units(nodes: Sequence[Node], piece_of: Mapping[Node, Piece]) -> list[Unit]:
    members: dict[Piece | Node, list[Node]] = {}
    for node in nodes:
        members.setdefault(piece_of.get(node, node), []).append(node)
    return [Unit(key if isinstance(key, tuple) else None, tuple(found)) for key, found in members.items()]


def _edges(units: Sequence[Unit]) -> list[list[int]]:
    unit_of = {node: i for i, unit in enumerate(units) for node in unit.nodes}
    successors: list[list[int]] = [[] for _ in units]
    for i, unit in enumerate(units):
        for node in unit.nodes:
            for user in node.users:
                j = unit_of.get(user)
                if j is not None and j != i:
                    successors[i].append(j)
    return successors


def _kahn(nodes: Sequence[Node], piece_of: Mapping[Node, Piece]) -> tuple[list[Unit], list[Unit]]:
    units = _units(nodes, piece_of)
    ordered = topological(_edges(units))
    placed = set(ordered)
    return [units[i] for i in ordered], [unit for i, unit in enumerate(units) if i not in placed]


def _split(nodes: Sequence[Node], piece_of: dict[Node, Piece], stuck: Sequence[Unit], explain: bool) -> list[Cycle]:
    """Split the tags of each strongly connected component into levels, and update `piece_of`.

    A level rises with each entry into a tag from outside. Every edge inside the component keeps or raises it, and
    entering a tag raises it. So no cycle of pieces remains: it would have to enter a piece and return to the level that
    it left.
    """
    successors = _edges(stuck)
    graph = nx.DiGraph([(i, j) for i, following in enumerate(successors) for j in following])
    components = [sorted(c) for c in nx.strongly_connected_components(graph) if len(c) > 1]
    position = {node: i for i, node in enumerate(nodes)}
    cycles: list[Cycle] = []
    for component in sorted(components):
        if explain:
            cycles += _cycles(graph, component, stuck)
        members = sorted((node for i in component for node in stuck[i].nodes), key=position.__getitem__)
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
        _merge_back(members, piece_of)
        levels: dict[str, set[int]] = {}
        for node in claimed:
            levels.setdefault(piece_of[node][0], set()).add(piece_of[node][1])
        number = {(tag, level): i for tag, found in levels.items() for i, level in enumerate(sorted(found))}
        piece_of.update({node: (piece_of[node][0], number[piece_of[node]]) for node in claimed})
    return cycles


def _merge_back(members: Sequence[Node], piece_of: dict[Node, Piece]) -> None:
    """Merge neighbouring pieces of a tag again if that closes no cycle: levels split more than necessary."""
    units = _units(members, piece_of)
    pieces = [unit.piece for unit in units if unit.piece is not None]
    if len(pieces) > _MERGE_LIMIT:
        return
    claimed = [node for node in members if node in piece_of]
    for tag in dict.fromkeys(piece[0] for piece in pieces):
        levels = sorted(piece[1] for piece in pieces if piece[0] == tag)
        kept = levels[0]
        for level in levels[1:]:
            trial = {n: (tag, kept) if piece_of[n] == (tag, level) else piece_of[n] for n in claimed}
            if _kahn(members, trial)[1]:
                kept = level
            else:
                piece_of.update(trial)


def _cycles(graph: nx.DiGraph, component: Iterable[int], stuck: Sequence[Unit]) -> list[Cycle]:
    """Describe the shortest cycle through each tag of a component."""
    subgraph = graph.subgraph(component)
    backwards = subgraph.reverse(copy=False)
    found: list[Cycle] = []
    for i in sorted(component):
        piece = stuck[i].piece
        if piece is not None:
            steps = nx.single_source_shortest_path_length(backwards, i)
            following = min(subgraph.successors(i), key=lambda j, steps=steps: (steps[j], j))  # type: ignore[misc]
            names: list[str] = []  # of the nodes at which the loop leaves one unit and enters the next
            for one, other in pairwise([i, *nx.shortest_path(subgraph, following, i)]):
                target = set(stuck[other].nodes)
                source, user = next((n, u) for n in stuck[one].nodes for u in n.users if u in target)
                names += [name for name in (source.name, user.name) if not names or names[-1] != name]
            found.append(Cycle(piece[0], tuple(names)))
    return found
