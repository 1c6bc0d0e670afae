"""The one topological sort, the one search for what can be reached, and what stays together in a graph."""

from __future__ import annotations

from collections import deque

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


def test_the_queue_decides_which_ready_vertex_comes_next() -> None:
    class OldestFirst:
        def __init__(self) -> None:
            self.queue: deque[int] = deque()

        def push(self, vertex: int) -> None:
            self.queue.append(vertex)

        def pop(self) -> int:
            return self.queue.popleft()

        def __len__(self) -> int:
            return len(self.queue)

    successors = [[3], [], [4], [], []]
    assert topological(successors, OldestFirst()) == [0, 1, 2, 3, 4]
    assert topological([[4], [3], [], [], []], OldestFirst()) == [0, 1, 2, 4, 3]


@settings(deadline=None)
@given(graphs_of_numbers(), st.integers(0, 11), st.integers(0, 11))
def test_what_is_reached_is_what_networkx_reaches(successors: list[list[int]], start: int, end: int) -> None:
    if start >= len(successors):
        return
    inside = directed(successors).subgraph(v for v in range(len(successors)) if v <= end or v == start)
    found = reach([(start, v) for v in successors[start]], successors.__getitem__, lambda v: v <= end)
    assert set(found) - {start} == {v for v in nx.descendants(inside, start) if v <= end}
    assert all(vertex in successors[before] for vertex, before in found.items())


def test_the_search_ends_at_its_goal() -> None:
    looked_at: list[int] = []

    def successors(vertex: int) -> list[int]:
        looked_at.append(vertex)
        return [vertex + 1]

    found = reach([(0, 1)], successors, lambda vertex: True, goal=5)
    assert 5 in found and looked_at == [1, 2, 3, 4]
