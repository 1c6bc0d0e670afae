"""The schedule behind the proposals: to which partition each vertex of a directed acyclic graph goes.

Vertices are numbered in topological order and have a label, the backend that takes them, or None for the host. A
schedule is a sequence of epochs, each with a label; every labelled vertex goes to an epoch of its label so that no edge
leads to an earlier epoch, and the vertices of an epoch are one partition. Host vertices lie between epochs. As a single
number: an epoch e has the stage 2e, the gap after it 2e + 1, and the stage must not decrease along an edge. Therefore
the graph stays acyclic when the epochs are contracted.

For one label the minimum number of epochs is known: a path that alternates k times between host and backend needs k
partitions, and putting each vertex into the epoch of its longest alternating path uses no more. Several labels are
scheduled greedily, longest remaining alternation first, forwards and backwards, then shortened; LiteRT partitions a
graph by such alternating epochs too (tensorflow/lite/graph_info.cc).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from exir_lowering.errors import InvariantError
from exir_lowering.graphs.order import topological

Edges = Sequence[Sequence[int]]
Label = str

_TRIALS = 2_000_000
"""How many vertices are examined, at most, when epochs of several labels are left out on trial."""


@dataclass(frozen=True, slots=True)
class Dag:
    """A directed acyclic graph whose vertices are numbered in topological order.

    Attributes:
        predecessors: The vertices before each vertex, each once.
        successors: The vertices after each vertex, each once.
        labels: The backend of each vertex, None for the host.
        size: Returns how many bytes a vertex hands over.
        leaves: Returns whether the caller of the graph gets the result of a vertex.
    """

    predecessors: Edges
    successors: Edges
    labels: Sequence[Label | None]
    size: Callable[[int], int] = field(default=lambda vertex: 1)
    leaves: Callable[[int], bool] = field(default=lambda vertex: False)


def dag(predecessors: Edges, labels: Sequence[Label | None]) -> Dag:
    """Make a graph from its predecessors alone."""
    successors: list[list[int]] = [[] for _ in labels]
    for vertex, before in enumerate(predecessors):
        for other in before:
            successors[other].append(vertex)
    return Dag(predecessors, successors, labels)


def fewest(graph: Dag) -> int:
    """Return the largest number of alternations on a path: no acyclic contraction has fewer partitions.

    For one label this is the number of partitions that `schedule` makes, for several it is a lower bound.
    """
    return max(_alternations(graph.predecessors, graph.labels), default=0)


def schedule(graph: Dag) -> list[int]:
    """Assign each labelled vertex to an epoch.

    Args:
        graph: The graph.

    Returns:
        The number of each vertex's epoch, from 1 in topological order; 0 for the host.
    """
    kinds = list(dict.fromkeys(label for label in graph.labels if label is not None))
    if not kinds:
        return [0] * len(graph.labels)
    sequence = kinds * fewest(graph) if len(kinds) == 1 else _shorten(graph, _greedy(graph, kinds))
    stages = _latest(graph, sequence)
    if stages is None:
        raise InvariantError("The sequence of a schedule has no epoch for a vertex. Please report this program.")
    _move(graph, sequence, stages, later=False)
    _move(graph, sequence, stages, later=True)
    used = sorted({stage for stage, label in zip(stages, graph.labels, strict=True) if label is not None})
    number = {stage: i for i, stage in enumerate(used, 1)}
    return [0 if label is None else number[stage] for stage, label in zip(stages, graph.labels, strict=True)]


def _alternations(predecessors: Edges, labels: Sequence[Label | None]) -> list[int]:
    """Return, for each vertex, the largest number of backend segments on a path that ends there."""
    most = [0] * len(labels)
    for vertex, label in enumerate(labels):
        count = 0
        if label is None:
            for before in predecessors[vertex]:
                if most[before] > count:
                    count = most[before]
        else:
            count = 1
            for before in predecessors[vertex]:
                found = most[before] + (labels[before] != label)
                if found > count:
                    count = found
        most[vertex] = count
    return most


# -- several labels ----------------------------------------------------------------------------------------------------


def _greedy(graph: Dag, kinds: Sequence[Label]) -> list[Label]:
    """Return the shortest sequence of labels that a few greedy runs find."""
    least = fewest(graph)
    best: list[Label] | None = None
    for backwards in (False, True):
        view = _reverse(graph) if backwards else graph
        for preferred in kinds:
            found = _epochs(view, preferred)
            if best is None or len(found) < len(best):
                best = found[::-1] if backwards else found
            if len(best) == least:
                return best
    return best or []


def _reverse(graph: Dag) -> Dag:
    last = len(graph.labels) - 1

    def flipped(edges: Edges) -> list[list[int]]:
        return [[last - other for other in edges[last - vertex]] for vertex in range(last + 1)]

    return Dag(flipped(graph.successors), flipped(graph.predecessors), list(reversed(graph.labels)))


def _epochs(graph: Dag, preferred: Label) -> list[Label]:
    """Take everything ready of one label, then of the label with the longest remaining alternation."""
    flipped = _reverse(graph)
    remaining = _alternations(flipped.predecessors, flipped.labels)[::-1]
    ready = _EpochByEpoch(graph.labels, remaining, preferred)
    topological(graph.successors, ready)
    return ready.sequence


class _EpochByEpoch:
    """Takes what is ready for the host, then for one label until nothing is left, and then chooses the next label."""

    def __init__(self, labels: Sequence[Label | None], remaining: Sequence[int], preferred: Label) -> None:
        self.sequence: list[Label] = []
        self._labels, self._remaining, self._preferred = labels, remaining, preferred
        self._host: list[int] = []
        self._ready: dict[Label, list[tuple[int, int]]] = {}
        self._epoch: Label | None = None
        self._count = 0

    def push(self, vertex: int) -> None:
        self._count += 1
        label = self._labels[vertex]
        if label is None:
            self._host.append(vertex)
        else:
            heapq.heappush(self._ready.setdefault(label, []), (-self._remaining[vertex], vertex))

    def pop(self) -> int:
        self._count -= 1
        if self._epoch is not None and self._ready[self._epoch]:
            return heapq.heappop(self._ready[self._epoch])[1]
        self._epoch = None  # over: what the host makes ready for the same label belongs to another epoch
        if self._host:
            return self._host.pop()
        choices = [(heap[0][0], label != self._preferred, label) for label, heap in self._ready.items() if heap]
        self._epoch = min(choices)[2]
        self.sequence.append(self._epoch)
        return heapq.heappop(self._ready[self._epoch])[1]

    def __len__(self) -> int:
        return self._count


def _shorten(graph: Dag, sequence: list[Label]) -> list[Label]:
    """Leave out epochs, one at a time, as long as every vertex still finds one."""
    least, size = fewest(graph), len(graph.labels)
    trials = max(0, _TRIALS // max(1, size))
    i = 0
    while i < len(sequence) and len(sequence) > least and trials > 0:
        shorter = sequence[:i] + sequence[i + 1 :]
        trials -= 1
        if _latest(graph, shorter) is None:
            i += 1
        else:
            sequence = shorter
    return sequence


# -- stages ------------------------------------------------------------------------------------------------------------


def _latest(graph: Dag, sequence: Sequence[Label]) -> list[int] | None:
    """Put each vertex as late as possible; return None if there is no epoch for one of them."""
    floor = _floors(sequence)
    stages = [0] * len(graph.labels)
    top = 2 * len(sequence) + 1
    for vertex in range(len(stages) - 1, -1, -1):
        stage = top
        for after in graph.successors[vertex]:
            if stages[after] < stage:
                stage = stages[after]
        label = graph.labels[vertex]
        if label is None:
            stage = stage if stage % 2 else stage - 1
        else:
            stage = 2 * floor[label][stage // 2] if label in floor else 0
        if stage < 1:
            return None
        stages[vertex] = stage
    return stages


def _floors(sequence: Sequence[Label]) -> dict[Label, list[int]]:
    """Return, for each label and epoch, the latest epoch of that label up to it, or 0."""
    floors: dict[Label, list[int]] = {label: [0] for label in dict.fromkeys(sequence)}
    for number, label in enumerate(sequence, 1):
        for other, table in floors.items():
            table.append(number if other == label else table[-1])
    return floors


def _move(graph: Dag, sequence: Sequence[Label], stages: list[int], *, later: bool) -> None:
    """Move vertices to where their inputs are made, unless more bytes cross, or to their readers if fewer do then."""
    top = 2 * len(sequence) + 1
    neighbours, nearest, end, step = (graph.successors, min, top, -1) if later else (graph.predecessors, max, 0, 1)
    for vertex in range(len(stages))[::step]:
        label, own = graph.labels[vertex], stages[vertex]
        stage = nearest((stages[other] for other in neighbours[vertex]), default=end)
        if label is None:
            stages[vertex] = stage if stage % 2 else stage + step
        elif min(own, end) < stage < max(own, end) and stage % 2 == 0 and sequence[stage // 2 - 1] == label:
            saved = _crossing(graph, stages, vertex, own) - _crossing(graph, stages, vertex, stage)
            if saved > 0 or (saved == 0 and not later):
                stages[vertex] = stage


def _crossing(graph: Dag, stages: Sequence[int], vertex: int, stage: int) -> int:
    """Return the bytes that a vertex would read from and hand to other partitions at a stage."""
    read = sum(graph.size(before) for before in graph.predecessors[vertex] if stages[before] != stage)
    handed = graph.leaves(vertex) or any(stages[after] != stage for after in graph.successors[vertex])
    return read + (graph.size(vertex) if handed else 0)
