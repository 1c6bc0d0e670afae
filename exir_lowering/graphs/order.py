"""Orders of directed graphs whose vertices are numbers, and what can be reached in them.

The one topological sort is Kahn's algorithm (CACM 5(11), 1962): whichever of the ready vertices comes next is left to a
queue, so that each use has the order that it needs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

Vertex = TypeVar("Vertex")


class Ready(Protocol):
    """The vertices whose predecessors have all been taken."""

    def push(self, vertex: int) -> None:
        """Add a vertex that has just become ready."""

    def pop(self) -> int:
        """Take the vertex that comes next."""

    def __len__(self) -> int:
        """Return how many are ready; 0 ends the sort."""


class LeastFirst:
    """Takes the ready vertex with the least key first.

    Args:
        key: The key of a vertex; its number by default, which keeps the given order where edges allow it.
    """

    def __init__(self, key: Callable[[int], Any] | None = None) -> None:
        self._key = key
        self._heap: list[Any] = []

    def push(self, vertex: int) -> None:
        """Add a vertex."""
        heapq.heappush(self._heap, vertex if self._key is None else (self._key(vertex), vertex))

    def pop(self) -> int:
        """Take the vertex with the least key, of equal ones the one with the least number."""
        item = heapq.heappop(self._heap)
        return int(item if self._key is None else item[1])

    def __len__(self) -> int:
        return len(self._heap)


def topological(successors: Sequence[Iterable[int]], ready: Ready | None = None) -> list[int]:
    """Order vertices so that each comes after its predecessors, in time linear in the edges but for the queue.

    Args:
        successors: For each vertex those that come after it; one that is named twice counts twice.
        ready: The queue of the ready vertices; `LeastFirst()` by default.

    Returns:
        The vertices in order. Those that lie on a cycle, or behind one, are missing.
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
    """Find what can be reached: the transitive closure of a few edges, by depth-first search.

    Args:
        edges: The first steps, each from a vertex to one that is reached; the last one is followed first.
        successors: The vertices after a vertex.
        within: Whether a vertex is of interest; the search does not enter others.
        goal: A vertex at which the search ends.

    Returns:
        Each vertex that is reached, with the one that it was reached from.
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


__all__ = ["LeastFirst", "Ready", "reach", "topological"]
