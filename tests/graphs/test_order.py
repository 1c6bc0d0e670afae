"""The one topological sort, and the one search for what can be reached."""

from __future__ import annotations

import networkx as nx
from hypothesis import given, settings, strategies as st

from exir_lowering.graphs.order import reach, topological


@st.composite
def graphs_of_numbers(draw: st.DrawFn) -> list[list[int]]:
    """Graphs with cycles, loops and edges that occur twice."""
    count = draw(st.integers(0, 12))
    return draw(st.lists(st.lists(st.integers(0, max(count - 1, 0)), max_size=4), min_size=count, max_size=count))


def directed(successors: list[list[int]]) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(successors)))
    graph.add_edges_from((vertex, after) for vertex, following in enumerate(successors) for after in following)
    return graph


@settings(deadline=None)
@given(graphs_of_numbers())
def test_the_order_is_that_of_networkx_and_cycles_are_missing(successors: list[list[int]]) -> None:
    graph = directed(successors)
    on_cycles = {v for c in nx.strongly_connected_components(graph) for v in c if len(c) > 1 or graph.has_edge(v, v)}
    behind = {after for vertex in on_cycles for after in nx.descendants(graph, vertex)} | on_cycles
    rest = graph.subgraph(set(graph) - behind)
    assert topological(successors) == list(nx.lexicographical_topological_sort(rest))


def test_vertices_come_when_they_are_ready_and_urgent_ones_at_once() -> None:
    successors = [[3], [], [4], [], []]
    assert topological(successors, lambda vertex: False) == [0, 1, 2, 3, 4]
    assert topological([[4], [3], [], [], []], lambda vertex: False) == [0, 1, 2, 4, 3]
    assert topological(successors, lambda vertex: vertex == 4) == [0, 1, 2, 4, 3]


@settings(deadline=None)
@given(graphs_of_numbers(), st.integers(0, 11), st.integers(0, 11))
def test_what_is_reached_is_what_networkx_reaches(successors: list[list[int]], start: int, end: int) -> None:
    if start >= len(successors):
        return
    inside = directed(successors).subgraph(v for v in range(len(successors)) if v <= end or v == start)
    found = reach([(start, v) for v in successors[start]], successors.__getitem__, lambda v: v <= end)
    assert set(found) - {start} == {v for v in nx.descendants(inside, start) if v <= end}
    assert all(vertex in successors[before] for vertex, before in found.items())
