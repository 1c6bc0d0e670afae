"""Which matches of patterns win, and which would form a cycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.partitioners.supports.matching import Candidate, Search, SearchedGraph
from exir_lowering.partitioners.supports.support import GraphScope

_ROUNDS = 8
"""For how many rounds one match of each cycle is dropped; then half of them are, to limit the rounds."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A match: the number of its candidate, and its nodes in graph order."""

    candidate: int
    nodes: tuple[Node, ...]


@dataclass(slots=True)
class Matching:
    """The matches of one graph, by positions of nodes: nodes that are remembered would keep their graph alive."""

    # The numbers of the candidates that were chosen and their nodes, in topological order, by their last nodes where it
    # is free.
    found: tuple[tuple[int, tuple[int, ...]], ...]
    # For nodes that were nearly in a match, the candidate's number and why not.
    reasons: dict[int, tuple[int, str]]
    # For candidates without a match, the first node that nearly matched, by its name, and why it did not.
    nearest: dict[int, tuple[str, str]]
    comparisons: int  # how many times a part of a pattern was compared with a node or value


def find(scope: GraphScope, candidates: Sequence[Candidate]) -> Matching:
    """Choose matches that share no node and that can all be contracted at once, in the order of `_list_tries`."""
    graph = SearchedGraph(scope)
    ranked: list[_Found] = []
    for anchor, number in _list_tries(graph, candidates):
        if anchor in graph.taken:
            graph.nearest.setdefault(number, (anchor, f"it is in a match of pattern {graph.taken[anchor]}"))
            continue
        search = Search(graph, candidates[number])
        nodes = search.run(anchor)
        if nodes is not None:
            ranked.append(_Found(number, nodes))
            graph.taken.update(dict.fromkeys(nodes, candidates[number].name))
            continue
        if search.refused:
            graph.nearest.setdefault(number, (anchor, search.reason))
        for node in search.refused:
            graph.reasons.setdefault(node, (number, search.reason))
    several = [len(candidate.template.results) > 1 for candidate in candidates]
    kept = _break_cycles(graph, ranked, several)
    kept = _sort_matches(graph, kept, any(several[found.candidate] for found in kept))
    return Matching(
        tuple((found.candidate, tuple(map(graph.position.__getitem__, found.nodes))) for found in kept),
        {graph.position[node]: reason for node, reason in graph.reasons.items()},
        {number: (graphs.qualified_name(scope.path, node), text) for number, (node, text) in graph.nearest.items()},
        graph.comparisons,
    )


def _list_tries(graph: SearchedGraph, candidates: Sequence[Candidate]) -> list[tuple[Node, int]]:
    """Return where to search for which candidate: by priority, size, place of the last operator, and number."""
    tries = [
        (-candidate.priority, -len(candidate.template.operators), graph.position[anchor], number)
        for number, candidate in enumerate(candidates)
        for name in candidate.template.operators[-1].arguments
        for anchor in graph.by_name.get(name, ())
    ]
    return [(graph.nodes[position], number) for _, _, position, number in sorted(tries)]


def _break_cycles(graph: SearchedGraph, ranked: Sequence[_Found], several: Sequence[bool]) -> list[_Found]:
    """Drop matches that feed each other both ways, as only those with several results can, the last ones first."""
    kept, turn = list(ranked), 0
    while sum(several[found.candidate] for found in kept) > 1:
        given_up: set[int] = set()
        for component in _find_cycles(graph, kept):
            inside = [i for i in component if several[kept[i].candidate]]
            count = 1 if turn < _ROUNDS else max(1, len(inside) // 2)
            why = f"it and the match at {kept[inside[0]].nodes[-1].name} would feed each other both ways"
            for i in inside[-count:]:
                given_up.add(i)
                graph.nearest.setdefault(kept[i].candidate, (kept[i].nodes[-1], why))
                graph.reasons.update(dict.fromkeys(kept[i].nodes, (kept[i].candidate, why)))
        if not given_up:
            break
        kept = [found for i, found in enumerate(kept) if i not in given_up]
        turn += 1
    return kept


def _find_cycles(graph: SearchedGraph, kept: Sequence[_Found]) -> list[list[int]]:
    """Return the numbers of the matches on each knot of cycles that contracting all of them would form."""
    knots = [knot for knot in nx.strongly_connected_components(_contract_matches(graph, kept)) if len(knot) > 1]
    return sorted(sorted(item for item in knot if isinstance(item, int)) for knot in knots)


def _contract_matches(graph: SearchedGraph, kept: Sequence[_Found]) -> Any:
    """Return the graph with each match as one vertex, its number."""
    unit: dict[Node, Any] = {node: i for i, found in enumerate(kept) for node in found.nodes}
    contracted: Any = nx.DiGraph()
    for node in graph.nodes:
        source = unit.get(node, node)
        contracted.add_node(source)
        targets = (unit.get(user, user) for user in node.users)
        contracted.add_edges_from((source, target) for target in targets if target != source)
    return contracted


def _sort_matches(graph: SearchedGraph, kept: Sequence[_Found], several: bool) -> list[_Found]:
    """Order matches topologically, by their last nodes where the order is free; for single results, these suffice."""
    kept = sorted(kept, key=lambda found: graph.position[found.nodes[-1]])
    if not several:
        return kept

    def position(item: Any) -> int:
        return graph.position[kept[item].nodes[-1] if isinstance(item, int) else item]

    ordered = nx.lexicographical_topological_sort(_contract_matches(graph, kept), key=position)
    return [kept[item] for item in ordered if isinstance(item, int)]
