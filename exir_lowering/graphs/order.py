"""Topological order (Kahn's algorithm) and reachability in directed graphs whose vertices are numbers."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Vertex = TypeVar("Vertex")


def topological(successors: Sequence[Iterable[int]], urgent: Callable[[int], bool] | None = None) -> list[int]:
    """Order vertices, without those on or after a cycle, so that each comes after its predecessors.

    What is `urgent` comes at once when it is ready, the others in the order in which they become ready. By default, the
    ready vertex with the least number comes first, which keeps the given order where the edges allow it.
    """
    waiting = [0] * len(successors)
    for following in successors:
        for after in following:
            waiting[after] += 1
    heap: list[int] = []
    queue: deque[int] = deque()

    def push(vertex: int) -> None:
        if urgent is None:
            heapq.heappush(heap, vertex)
        elif urgent(vertex):
            queue.appendleft(vertex)
        else:
            queue.append(vertex)

    for vertex, count in enumerate(waiting):
        if not count:
            push(vertex)
    order: list[int] = []
    while heap or queue:
        vertex = heapq.heappop(heap) if heap else queue.popleft()
        order.append(vertex)
        for after in successors[vertex]:
            waiting[after] -= 1
            if not waiting[after]:
                push(after)
    return order


def reach(
    edges: Iterable[tuple[Vertex, Vertex]],
    successors: Callable[[Vertex], Iterable[Vertex]],
    within: Callable[[Vertex], bool],
) -> dict[Vertex, Vertex]:
    """Return what some edges lead to, by depth-first search of what is `within`, each with its predecessor."""
    came_from: dict[Vertex, Vertex] = {}
    stack = list(edges)
    while stack:
        before, vertex = stack.pop()
        if vertex not in came_from and within(vertex):
            came_from[vertex] = before
            stack += [(vertex, after) for after in successors(vertex) if after not in came_from]
    return came_from
