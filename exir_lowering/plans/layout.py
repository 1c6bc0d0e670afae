"""The layout of a picture: rows by longest path, few crossings, straight lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

BOX_WIDTH, BOX_HEIGHT = 220.0, 56.0
_GAP_X, _GAP_Y, _LANE, _MARGIN = 28.0, 64.0, 18.0, 24.0
_LONG = 24
"""How many rows a line may cross between boxes; longer lines go straight, behind the boxes."""
_ALONE = 6
"""How many vertices without edges share a row."""
_SWEEPS = 6
_HOME = 0.9
"""The share of its neighbours' distance from the middle that a box keeps, so that a long picture stays upright."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of vertices and lines."""

    ranks: list[int]  # the row of each vertex
    centres: list[Point]
    # the points of each edge's line, from the bottom of its source to the top of its target
    routes: dict[tuple[int, int], tuple[Point, ...]]
    width: float
    height: float


@dataclass(slots=True)
class _Rows:
    """Vertices, and lanes for the lines that cross a row, by row. Items from `vertices` on are lanes."""

    vertices: int
    ranks: list[int]
    rows: list[list[int]]
    above: list[list[int]]
    below: list[list[int]]
    lanes: dict[tuple[int, int], int] = field(default_factory=dict)
    """The lane of a vertex's lines in a row, which all of them share."""

    def is_lane(self, item: int) -> bool:
        return item >= self.vertices

    def width(self, item: int) -> float:
        return _LANE if self.is_lane(item) else BOX_WIDTH + _GAP_X


def place(vertices: int, edges: Sequence[tuple[int, int]]) -> Layout:
    """Lay out a directed acyclic graph, whose vertices are numbered in topological order; it has each edge once."""
    rows = _with_lanes(_ranks(vertices, edges), edges)
    _order(rows)
    x = _positions(rows)
    low = min((x[v] - BOX_WIDTH / 2 if not rows.is_lane(v) else x[v] for v in range(len(x))), default=0.0)
    x = [round(value - low + _MARGIN, 1) for value in x]
    y = [_MARGIN + BOX_HEIGHT / 2 + rank * (BOX_HEIGHT + _GAP_Y) for rank in rows.ranks]
    width = max((x[v] + (0 if rows.is_lane(v) else BOX_WIDTH / 2) for v in range(len(x))), default=0.0) + _MARGIN
    height = max(y, default=0.0) + BOX_HEIGHT / 2 + _MARGIN
    return Layout(
        rows.ranks[:vertices], list(zip(x, y, strict=True))[:vertices], _routes(rows, edges, x, y), width, height
    )


def _ranks(vertices: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Rank by longest path; sources go just above their first reader, vertices without edges below the rest."""
    ranks = [0] * vertices
    readers: list[list[int]] = [[] for _ in ranks]
    reads = [False] * vertices
    for source, target in sorted(edges):
        ranks[target] = max(ranks[target], ranks[source] + 1)
        readers[source].append(target)
        reads[target] = True
    for vertex in range(vertices):
        if readers[vertex] and not reads[vertex]:
            ranks[vertex] = min(ranks[reader] for reader in readers[vertex]) - 1
    alone = [vertex for vertex in range(vertices) if not readers[vertex] and not reads[vertex]]
    bottom = max(ranks, default=0) + 1 if len(alone) < vertices else 0
    for i, vertex in enumerate(alone):
        ranks[vertex] = bottom + i // _ALONE
    return ranks


def _with_lanes(ranks: list[int], edges: Sequence[tuple[int, int]]) -> _Rows:
    rows: list[list[int]] = [[] for _ in range(max(ranks, default=-1) + 1)]
    for vertex, rank in enumerate(ranks):
        rows[rank].append(vertex)
    drawn = _Rows(len(ranks), list(ranks), rows, [[] for _ in ranks], [[] for _ in ranks])
    for source, target in edges:
        if ranks[target] - ranks[source] > _LONG:
            continue
        last = source
        for rank in range(ranks[source] + 1, ranks[target]):
            if (source, rank) not in drawn.lanes:
                lane = len(drawn.ranks)
                drawn.lanes[source, rank] = lane
                drawn.ranks.append(rank)
                drawn.rows[rank].append(lane)
                drawn.above.append([last])
                drawn.below.append([])
                drawn.below[last].append(lane)
            last = drawn.lanes[source, rank]
        drawn.below[last].append(target)
        drawn.above[target].append(last)
    return drawn


def _order(rows: _Rows) -> None:
    """Order each row by the mean position of the neighbours, downwards and upwards in turn."""
    place: dict[int, float] = {}

    def note(row: Sequence[int]) -> None:
        place.update({item: (i + 0.5) / len(row) for i, item in enumerate(row)})

    def sort(row: list[int], neighbours: Sequence[Sequence[int]]) -> None:
        def mean(item: int) -> float:
            near = neighbours[item]
            return sum(place[other] for other in near) / len(near) if near else place[item]

        row.sort(key=mean)
        note(row)

    for row in rows.rows:
        note(row)
    for _ in range(_SWEEPS):
        for row in rows.rows:
            sort(row, rows.above)
        for row in reversed(rows.rows):
            sort(row, rows.below)


def _positions(rows: _Rows) -> list[float]:
    """Move each item towards its neighbours, as far as the row's order and the widths allow."""
    x = [0.0] * len(rows.ranks)
    for row in rows.rows:
        _fit(rows, row, x, lambda item: 0.0)

    def towards(*sides: Sequence[Sequence[int]]) -> Callable[[int], float]:
        def wanted(item: int) -> float:
            near = [other for side in sides for other in side[item]]
            mean = sum(x[other] for other in near) / len(near) if near else x[item]
            return mean if rows.is_lane(item) else mean * _HOME

        return wanted

    for _ in range(_SWEEPS):
        for row in rows.rows:
            _fit(rows, row, x, towards(rows.above))
        for row in reversed(rows.rows):
            _fit(rows, row, x, towards(rows.below))
    for row in rows.rows:
        _fit(rows, row, x, towards(rows.above, rows.below))
    return x


def _fit(rows: _Rows, row: Sequence[int], x: list[float], wanted: Callable[[int], float]) -> None:
    """Place the items of a row as close to where they want to be as possible (least squares), without overlap."""
    offsets, offset = [], 0.0
    blocks: list[tuple[float, float, int]] = []  # weighted sum of wishes, weight, items: pooled while they overlap
    for i, item in enumerate(row):
        offset += (rows.width(row[i - 1]) + rows.width(item)) / 2 if i else 0.0
        offsets.append(offset)
        weight = 8.0 if rows.is_lane(item) else 1.0  # a line without a kink is worth more than a centred box
        block = (weight * (wanted(item) - offset), weight, 1)
        while blocks and blocks[-1][0] / blocks[-1][1] >= block[0] / block[1]:
            total, weight, items = blocks.pop()
            block = (total + block[0], weight + block[1], items + block[2])
        blocks.append(block)
    start = 0
    for total, weight, items in blocks:
        for i in range(start, start + items):
            x[row[i]] = total / weight + offsets[i]
        start += items


def _routes(
    rows: _Rows, edges: Sequence[tuple[int, int]], x: Sequence[float], y: Sequence[float]
) -> dict[tuple[int, int], tuple[Point, ...]]:
    leaving, entering = _ports(rows, rows.below, x), _ports(rows, rows.above, x)
    half, corner = BOX_HEIGHT / 2, BOX_WIDTH / 2 - 10
    routes: dict[tuple[int, int], tuple[Point, ...]] = {}
    for source, target in edges:
        if rows.ranks[target] - rows.ranks[source] > _LONG:
            start, end = x[source] + corner, x[target] + corner
            routes[source, target] = ((start, y[source] + half), (end, y[target] - half))
            continue
        lanes = [rows.lanes[source, rank] for rank in range(rows.ranks[source] + 1, rows.ranks[target])]
        first, last = (lanes[0], lanes[-1]) if lanes else (target, source)
        points = [(leaving[source, first], y[source] + half)]
        for lane in lanes:
            points += [(x[lane], y[lane] - half), (x[lane], y[lane] + half)]
        routes[source, target] = (*points, (entering[target, last], y[target] - half))
    return routes


def _ports(rows: _Rows, neighbours: Sequence[Sequence[int]], x: Sequence[float]) -> Mapping[tuple[int, int], float]:
    """Spread the lines of a vertex along its edge, in the order of their other ends."""
    ports = {}
    for vertex in range(rows.vertices):
        others = sorted(neighbours[vertex], key=lambda other: (x[other], other))
        step = min(40.0, (BOX_WIDTH - 50) / max(1, len(others)))
        for i, other in enumerate(others):
            ports[vertex, other] = round(x[vertex] + (i - (len(others) - 1) / 2) * step, 1)
    return ports
