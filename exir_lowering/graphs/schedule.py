"""The fewest convex partitions of one backend: to which epoch each claimed vertex of a directed acyclic graph goes.

No edge leads to an earlier epoch, and the vertices of an epoch are one partition; vertices of the host lie between. As
a single number: an epoch e has the stage 2e, the gap after it 2e + 1, and no stage decreases along an edge. Each vertex
goes as late as possible, and then to where fewer bytes cross.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def schedule(
    predecessors: Sequence[Sequence[int]],
    claimed: Sequence[bool],
    size: Callable[[int], int] = lambda vertex: 1,
    leaves: Callable[[int], bool] = lambda vertex: False,
) -> list[int]:
    """Return the number of each claimed vertex's epoch, from 1; 0 for the host. No acyclic contraction has fewer.

    Vertices are numbered in topological order, and list what is before them once; `size` is how many bytes one hands
    over, and `leaves` whether the caller of the graph gets it.
    """
    count = len(claimed)
    successors: list[list[int]] = [[] for _ in claimed]
    alternations = [0] * count  # the most epochs on a path that ends at each vertex
    for vertex, before in enumerate(predecessors):
        most = alternations[vertex] = int(claimed[vertex])
        for other in before:
            successors[other].append(vertex)
            most = max(most, alternations[other] + (claimed[vertex] and not claimed[other]))
        alternations[vertex] = most
    top = 2 * max(alternations, default=0) + 1
    stages = [0] * count
    for vertex in reversed(range(count)):
        stage = min((stages[after] for after in successors[vertex]), default=top)
        stages[vertex] = stage - (stage % 2 == claimed[vertex])

    def crossing(vertex: int, stage: int) -> int:
        """Return the bytes that a vertex would read from and hand to other partitions at a stage."""
        read = sum(size(before) for before in predecessors[vertex] if stages[before] != stage)
        handed = leaves(vertex) or any(stages[after] != stage for after in successors[vertex])
        return read + (size(vertex) if handed else 0)

    # To where the inputs are made, unless more bytes cross then; after that to the readers, if fewer do.
    for neighbours, nearest, end, step in ((predecessors, max, 0, 1), (successors, min, top, -1)):
        for vertex in range(count)[::step]:
            own, stage = stages[vertex], nearest((stages[other] for other in neighbours[vertex]), default=end)
            if not claimed[vertex]:
                stages[vertex] = stage if stage % 2 else stage + step
            elif min(own, end) < stage < max(own, end) and stage % 2 == 0:
                saved = crossing(vertex, own) - crossing(vertex, stage)
                if saved > 0 or (saved == 0 and step > 0):
                    stages[vertex] = stage
    used = sorted({stage for stage, taken in zip(stages, claimed, strict=True) if taken})
    number = {stage: i for i, stage in enumerate(used, 1)}
    return [number[stage] if taken else 0 for stage, taken in zip(stages, claimed, strict=True)]
