"""The boxes of a picture that fits a page: repeated layers are one box with a count, and so is what is too much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from exir_lowering.plans import naming
from exir_lowering.plans.picture import Picture, Vertex
from exir_lowering.plans.planned import PlannedNode

MOST = 30
"""How many boxes a picture has."""

_PERIOD = 60
"""How many vertices a layer that is repeated may have."""


@dataclass(frozen=True, slots=True)
class Box:
    """Vertices that follow one another in topological order, drawn as one."""

    vertices: tuple[Vertex, ...]
    times: int = 1  # how often the same vertices are repeated in it

    @property
    def nodes(self) -> tuple[PlannedNode, ...]:
        """All operators in it."""
        return tuple(node for vertex in self.vertices for node in vertex.nodes)

    @property
    def title(self) -> str:
        """What it is, with the number of its repetitions."""
        name = self.vertices[0].title if len(self.vertices) == 1 else naming.name_nodes(self.nodes)
        return name if self.times == 1 else f"{self.times} x {name}"

    @property
    def operators(self) -> str:
        """What it computes, and each time if it is repeated."""
        one = Box(self.vertices[: len(self.vertices) // self.times])
        return ("each " if self.times > 1 else "") + naming.count_operators(one.nodes)

    @property
    def where(self) -> str:
        """Where it runs: a backend or the host, or how much of it on which."""
        if len(self.vertices) == 1:
            return self.vertices[0].where
        counts = Counter(vertex.where for vertex in self.vertices)
        return ", ".join(f"{count:,} x {where}" for where, count in counts.items())

    @property
    def backend(self) -> str | None:
        """The first backend in it, None if all of it is on the host."""
        return next((vertex.backend for vertex in self.vertices if vertex.backend is not None), None)


def fold(picture: Picture, most: int = MOST) -> list[Box]:
    """Return a picture's boxes, at most so many: stretches of the topological order, so that they form no cycle."""
    boxes = _repeated(picture.vertices)
    depth = max((name.count(".") for box in boxes for name in _modules(box)), default=0)
    names: dict[int, tuple[Box, list[str]]] = {}  # of each box once, by its identity
    while len(boxes) > most and depth >= 0:
        for box in boxes:
            if id(box) not in names:
                names[id(box)] = box, naming.name_modules(_modules(box)).split(".")
        boxes = _joined(boxes, [names[id(box)][1][: depth + 1] for box in boxes])
        depth -= 1
    if len(boxes) > most:
        boxes = _joined(boxes, [[str(i * most // len(boxes))] for i in range(len(boxes))])
    return boxes


def edges(picture: Picture, boxes: Sequence[Box]) -> dict[tuple[int, int], int]:
    """Return the bytes that go from box to box, by their numbers."""
    owner = {vertex.id: i for i, box in enumerate(boxes) for vertex in box.vertices}
    handed: dict[tuple[int, int], int] = {}
    for edge in picture.edges:
        pair = owner[edge.source], owner[edge.target]
        if pair[0] != pair[1]:
            handed[pair] = handed.get(pair, 0) + edge.bytes
    return handed


def _modules(box: Box) -> list[str]:
    return [node.module for node in box.nodes]


def _repeated(vertices: Sequence[Vertex]) -> list[Box]:
    """Make a box of each longest stretch that repeats the same vertices, and of each other vertex."""
    kinds: dict[object, int] = {}
    row = [
        kinds.setdefault((v.backend, frozenset(Counter(node.operator for node in v.nodes).items())), len(kinds))
        for v in vertices
    ]
    boxes, start = [], 0
    while start < len(row):
        period, times = 1, 1
        for length in range(1, min(_PERIOD, (len(row) - start) // 2) + 1):
            count = 1
            while row[start + count * length : start + (count + 1) * length] == row[start : start + length]:
                count += 1
            if length * (count - 1) > max(1, period * (times - 1)):  # two of a kind are not worth it
                period, times = length, count
        boxes.append(Box(tuple(vertices[start : start + period * times]), times))
        start += period * times
    return boxes


def _joined(boxes: Sequence[Box], keys: Sequence[list[str]]) -> list[Box]:
    """Join boxes that follow one another and have the same key."""
    joined: list[list[Box]] = []
    for i, box in enumerate(boxes):
        if i and keys[i] == keys[i - 1] and keys[i] != [""]:
            joined[-1].append(box)
        else:
            joined.append([box])
    return [
        same[0] if len(same) == 1 else Box(tuple(vertex for box in same for vertex in box.vertices)) for same in joined
    ]
