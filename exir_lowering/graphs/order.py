"""Topological order and reachability in directed graphs whose vertices are numbers.

The topological sort is Kahn's algorithm (CACM 5(11), 1962). A queue decides which of the ready vertices comes next, so
that each caller gets the order that it needs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

Vertex = TypeVar("Vertex")


class Ready(Protocol):
    """A queue of the vertices whose predecessors have all been taken."""

    def push(self, vertex: int) -> None:
        """Add a vertex that has just become ready."""

    def pop(self) -> int:
        """Take the next vertex."""

    def __len__(self) -> int:
        """Return the number of ready vertices; 0 ends the sort."""


class LeastFirst:
    """Takes the ready vertex with the least number first, which keeps the given order where the edges allow it."""

    def __init__(self) -> None:
        self._heap: list[int] = []

    def push(self, vertex: int) -> None:
        """Add a vertex."""
        heapq.heappush(self._heap, vertex)

    def pop(self) -> int:
        """Take the vertex with the least number."""
        return heapq.heappop(self._heap)

    def __len__(self) -> int:
        return len(self._heap)


def topological(successors: Sequence[Iterable[int]], ready: Ready | None = None) -> list[int]:
    """Order vertices so that each comes after its predecessors, in time linear in the edges, not counting the queue.

    Args:
        successors: The successors of each vertex; one may be listed more than once.
        ready: The queue of ready vertices; `LeastFirst()` by default.

    Returns:
        The vertices in order, without those on a cycle or after one.
    """
    queue = LeastFirst() if ready is None else ready
    waiting = [0] * len(successors)
    for following in successors:
        for after in following:
            waiting[after] += 1
    for vertex, count in enumerate(waiting):
        if not count:
            queue.push(vertex)
    order: list[int] = []
    while queue:
        vertex = queue.pop()
        order.append(vertex)
        for after in successors[vertex]:
            waiting[after] -= 1
            if not waiting[after]:
                queue.push(after)
    return order


def reach(
    edges: Iterable[tuple[Vertex, Vertex]],
    successors: Callable[[Vertex], Iterable[Vertex]],
    within: Callable[[Vertex], bool],
    goal: Vertex | None = None,
) -> dict[Vertex, Vertex]:
    """Find the vertices that can be reached through some edges, by depth-first search.

    Args:
        edges: The first edges to follow; the last one is followed first.
        successors: Returns the successors of a vertex.
        within: Returns whether the search may enter a vertex.
        goal: A vertex at which the search ends.

    Returns:
        Each vertex that is reached, with its predecessor on the path.
    """
    came_from: dict[Vertex, Vertex] = {}
    stack = list(edges)
    while stack:
        before, vertex = stack.pop()
        if vertex in came_from or not within(vertex):
            continue
        came_from[vertex] = before
        if goal is not None and vertex == goal:
            break
        stack += [(vertex, after) for after in successors(vertex) if after not in came_from]
    return came_from
