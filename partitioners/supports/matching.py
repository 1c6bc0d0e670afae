"""Choose among the matches of small operator graphs in a large one: which one wins, and which would form a cycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
from torch.fx import Node

from exir_lowering.graphs.order import LeastFirst, topological
from exir_lowering.partitioners.supports.match_search import Candidate, Search, SearchedGraph
from exir_lowering.partitioners.supports.support import GraphScope

_ROUNDS = 8
"""For how many rounds one match of each cycle is dropped; then half of them are, to limit the rounds."""


@dataclass(frozen=True, slots=True)
class Found:
    """A match: the number of its candidate, and its nodes in graph order."""

    candidate: int
    nodes: tuple[Node, ...]


@dataclass(slots=True)
class Matching:
    """The matches of one graph."""

    # The chosen ones in topological order, by their last nodes where it is free.
    found: list[Found] = field(default_factory=list)
    # For nodes that were nearly in a match, the candidate's number and why not.
    reasons: dict[Node, tuple[int, str]] = field(default_factory=dict)
    # For candidates without a match, the first node that nearly matched, and why it did not.
    nearest: dict[int, tuple[Node, str]] = field(default_factory=dict)
    comparisons: int = 0  # how many times a part of a pattern was compared with a node or value


def find(scope: GraphScope, candidates: Sequence[Candidate]) -> Matching:
    """Choose matches that share no node and that can all be contracted at once.

    Higher priority goes first, then more operators, then the match whose last operator comes first in the graph, then
    the order of the candidates.
    """
    graph = SearchedGraph(scope)
    matching = Matching()
    ranked: list[Found] = []
    for _, numbers in sorted(_rank(candidates).items()):
        for anchor, number in _list_anchors(graph, candidates, numbers):
            if anchor in graph.taken:
                matching.nearest.setdefault(number, (anchor, f"it is in a match of pattern {graph.taken[anchor]}"))
                continue
            search = Search(graph, candidates[number])
            nodes = search.run(anchor)
            if nodes is not None:
                ranked.append(Found(number, nodes))
                graph.taken.update(dict.fromkeys(nodes, candidates[number].name))
            else:
                if search.refused:
                    matching.nearest.setdefault(number, (anchor, search.reason))
                for node in search.refused:
                    matching.reasons.setdefault(node, (number, search.reason))
    matching.comparisons = graph.comparisons
    several = [len(candidate.template.results) > 1 for candidate in candidates]
    kept = _break_cycles(graph, ranked, several, matching)
    matching.found = _sort_matches(graph, kept, any(several[found.candidate] for found in kept))
    return matching


def _rank(candidates: Sequence[Candidate]) -> dict[tuple[int, int], list[int]]:
    ranks: dict[tuple[int, int], list[int]] = {}
    for number, candidate in enumerate(candidates):
        ranks.setdefault((-candidate.priority, -len(candidate.template.operators)), []).append(number)
    return ranks


def _list_anchors(
    graph: SearchedGraph, candidates: Sequence[Candidate], numbers: Sequence[int]
) -> list[tuple[Node, int]]:
    pairs = [
        (anchor, number)
        for number in numbers
        for name in candidates[number].template.operators[-1].arguments
        for anchor in graph.by_name.get(name, ())
    ]
    return sorted(pairs, key=lambda pair: (graph.position[pair[0]], pair[1]))


def _break_cycles(
    graph: SearchedGraph, ranked: Sequence[Found], several: Sequence[bool], matching: Matching
) -> list[Found]:
    """Drop matches that feed each other both ways, the last ones first.

    All values of a match with one result feed that result, so only matches with several results can do so.
    """
    kept, turn = list(ranked), 0
    while sum(several[found.candidate] for found in kept) > 1:
        given_up: set[int] = set()
        for component in _find_cycles(graph, kept):
            inside = [i for i in component if several[kept[i].candidate]]
            count = 1 if turn < _ROUNDS else max(1, len(inside) // 2)
            why = f"it and the match at {kept[inside[0]].nodes[-1].name} would feed each other both ways"
            for i in inside[-count:]:
                given_up.add(i)
                matching.nearest.setdefault(kept[i].candidate, (kept[i].nodes[-1], why))
                matching.reasons.update(dict.fromkeys(kept[i].nodes, (kept[i].candidate, why)))
        if not given_up:
            break
        kept = [found for i, found in enumerate(kept) if i not in given_up]
        turn += 1
    return kept


def _find_cycles(graph: SearchedGraph, kept: Sequence[Found]) -> list[list[int]]:
    """Return the numbers of the matches on each knot of cycles that contracting all of them would form."""
    knots = [knot for knot in nx.strongly_connected_components(_contract_matches(graph, kept)) if len(knot) > 1]
    return sorted(sorted(item for item in knot if isinstance(item, int)) for knot in knots)


def _contract_matches(graph: SearchedGraph, kept: Sequence[Found]) -> Any:
    """Return the graph with each match as one vertex, its number."""
    unit: dict[Node, Any] = {node: i for i, found in enumerate(kept) for node in found.nodes}
    contracted: Any = nx.DiGraph()
    for node in graph.nodes:
        source = unit.get(node, node)
        contracted.add_node(source)
        targets = (unit.get(user, user) for user in node.users)
        contracted.add_edges_from((source, target) for target in targets if target != source)
    return contracted


def _sort_matches(graph: SearchedGraph, kept: Sequence[Found], several: bool) -> list[Found]:
    """Order matches topologically, by their last nodes where the order is free; for single results, these suffice."""
    kept = sorted(kept, key=lambda found: graph.position[found.nodes[-1]])
    if not several:
        return kept

    contracted = _contract_matches(graph, kept)
    items = list(contracted)
    number = {item: i for i, item in enumerate(items)}
    successors = [[number[other] for other in contracted.successors(item)] for item in items]

    def position(vertex: int) -> int:
        item = items[vertex]
        return graph.position[kept[item].nodes[-1] if isinstance(item, int) else item]

    ordered = (items[vertex] for vertex in topological(successors, LeastFirst(position)))
    return [kept[item] for item in ordered if isinstance(item, int)]


__all__ = ["Found", "Matching", "find"]
