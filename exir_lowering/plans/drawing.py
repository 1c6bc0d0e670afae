"""Graphs drawn into HTML pages that need neither a network nor scripts: of plans, and of the methods of files."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from exir_lowering.plans import formatting as shown

BOX_WIDTH, BOX_HEIGHT = 260.0, 66.0
_HALF = BOX_HEIGHT / 2
_GAP_X, _GAP_Y, _LANE, _MARGIN = 28.0, 46.0, 16.0, 12.0
_ROWS = 6
"""How many rows a column has before there is another one beside it."""
_MUCH = 0.6
"""How high the one is, compared with the other, where it leaves much less room empty."""
_ALONE = 6
"""How many vertices without edges share a row."""
_SWEEPS = 6
_HOME = 0.9
"""The share of its neighbours' distance from the middle that a box keeps, so that a long picture stays upright."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of vertices and lines."""

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


def place(vertices: int, edges: Sequence[tuple[int, int]], room: float) -> Layout:
    """Lay out a directed acyclic graph, numbered in topological order: by longest path, or a row each, in columns."""
    in_rows, in_column = _lay_out(_ranks(vertices, edges), edges), _lay_out_in_a_column(vertices, edges)
    folded = _fold(in_column, room)
    if in_rows.width > room:
        return folded
    by_rank = _fold(in_rows, room)
    return folded if folded.height < by_rank.height * _MUCH else by_rank


def _lay_out(ranks: list[int], edges: Sequence[tuple[int, int]]) -> Layout:
    vertices, rows = len(ranks), _with_lanes(ranks, edges)
    _order(rows)
    x = _positions(rows)
    low = min((x[v] - BOX_WIDTH / 2 if not rows.is_lane(v) else x[v] for v in range(len(x))), default=0.0)
    x = [round(value - low + _MARGIN, 1) for value in x]
    y = [_MARGIN + _HALF + rank * (BOX_HEIGHT + _GAP_Y) for rank in rows.ranks]
    width = max((x[v] + (0 if rows.is_lane(v) else BOX_WIDTH / 2) for v in range(len(x))), default=0.0) + _MARGIN
    height = max(y, default=0.0) + _HALF + _MARGIN
    return Layout(list(zip(x, y, strict=True))[:vertices], _routes(rows, edges, x, y), width, height)


def _lay_out_in_a_column(vertices: int, edges: Sequence[tuple[int, int]]) -> Layout:
    """Put all boxes below one another; lines that pass boxes go beside them, those of a box along one lane."""
    middle, right = _MARGIN + BOX_WIDTH / 2, _MARGIN + BOX_WIDTH
    y = [_MARGIN + _HALF + i * (BOX_HEIGHT + _GAP_Y) for i in range(vertices)]
    last: dict[int, int] = {}  # the last box that a lane leads to, by the box it comes from
    entering: dict[int, list[int]] = {}
    for source, target in sorted(edges):
        if target > source + 1:
            last[source] = target
            entering.setdefault(target, []).append(source)
    free: list[int] = []  # by lane, the first box at which it is free
    lanes: dict[int, int] = {}
    for source, target in sorted(last.items()):
        lanes[source] = next((lane for lane, at in enumerate(free) if at <= source), len(free))
        free[lanes[source] : lanes[source] + 1] = [target]
    routes: dict[tuple[int, int], tuple[Point, ...]] = {}
    for source, target in edges:
        start, end = y[source] + _HALF, y[target] - _HALF
        if source not in lanes or target == source + 1:
            routes[source, target] = ((middle, start), (middle, end))
            continue
        lane, beside = right + _LANE / 2 + lanes[source] * _LANE / 2, sorted(entering[target], key=lanes.__getitem__)
        port = right - 20 - beside.index(source) * min(44.0, BOX_WIDTH / 3 / len(beside))
        passed = [(lane, middle_y + half) for middle_y in y[source + 1 : target] for half in (-_HALF, _HALF)]
        routes[source, target] = ((right - 20, start), *passed, (port, end))
    width = right + _MARGIN + len(free) * _LANE / 2
    height = max(y, default=0.0) + _HALF + _MARGIN
    return Layout([(middle, each) for each in y], routes, width, height)


def _fold(laid: Layout, room: float) -> Layout:
    """Put the lower parts of a long layout beside its upper part, in as many columns as there is room for."""
    most, row = max(1, int((room + _GAP_X) // (laid.width + _GAP_X))), BOX_HEIGHT + _GAP_Y
    rows = round((laid.height - 2 * _MARGIN + _GAP_Y) / row)
    columns = max(1, min(most, math.ceil(rows / _ROWS)))
    tall = math.ceil(rows / columns) * row
    columns = math.ceil(rows * row / tall)
    if columns == 1:
        return laid
    top = _GAP_Y * 2 / 3  # for the lines that come from the column before

    def move(point: Point) -> Point:
        column = min(columns - 1, int((point[1] - _MARGIN) // tall))
        return point[0] + column * (laid.width + _GAP_X), point[1] - column * tall + top

    def lead(points: Sequence[Point]) -> tuple[Point, ...]:
        """Lead a line from the end of a column to the start of the next one, up between both."""
        led = [move(points[0])]
        for point in map(move, points[1:]):
            if point[1] < led[-1][1]:
                between = led[-1][0] - led[-1][0] % (laid.width + _GAP_X) + laid.width + _GAP_X / 2
                low, high = led[-1][1] + _GAP_Y / 3, point[1] - top
                led += [(led[-1][0], low), (between, low), (between, high), (point[0], high)]
            led.append(point)
        return tuple((round(x, 1), round(y, 1)) for x, y in led)

    routes = {edge: lead(points) for edge, points in laid.routes.items()}
    width = columns * (laid.width + _GAP_X) - _GAP_X
    return Layout([move(centre) for centre in laid.centres], routes, width, tall + 2 * _MARGIN)


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
    routes: dict[tuple[int, int], tuple[Point, ...]] = {}
    for source, target in edges:
        lanes = [rows.lanes[source, rank] for rank in range(rows.ranks[source] + 1, rows.ranks[target])]
        first, last = (lanes[0], lanes[-1]) if lanes else (target, source)
        points = [(leaving[source, first], y[source] + _HALF)]
        for lane in lanes:
            points += [(x[lane], y[lane] - _HALF), (x[lane], y[lane] + _HALF)]
        routes[source, target] = (*points, (entering[target, last], y[target] - _HALF))
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


_COLOURS = 8
_WIDE, _NARROW = 1180.0, 330.0
"""How many pixels the picture has on a screen, and on a phone."""

_LABELS = 4
"""How many lines that enter a box have room for labels."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a picture, from a box to another one."""

    path: str  # as SVG writes it
    x: float  # of its end
    y: float
    label: str  # what goes along it, "" if that is nothing or there is no room
    label_y: float
    carries: bool  # whether tensors go along it
    words: str


def render(package: str, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """Render a package's page; all values are escaped, and a policy lets the browser run and load nothing."""
    loader = ChoiceLoader([PackageLoader(one, "assets") for one in (package, "exir_lowering.plans")])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(filters, size=shown.size, head=shown.head, tail=shown.tail, breaks=_with_breaks)
    style = "".join(loader.get_source(environment, name)[0] for name in ("page.css", "drawing.css"))
    digest = "sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    box = BOX_WIDTH, BOX_HEIGHT
    return environment.get_template("page.html.jinja").render(values, box=box, style=style, style_hash=digest)


def colours(backends: Iterable[str]) -> dict[str | None, str]:
    """Return the class of each backend's boxes, and of the host's."""
    return {**{backend: f"b{i % _COLOURS}" for i, backend in enumerate(backends)}, None: "host"}


def draw(boxes: Sequence[Any], handed: Mapping[tuple[int, int], int]) -> dict[str, dict[str, Any]]:
    """Return the pictures of boxes with titles, for a screen and for a phone, from the bytes that go between them."""
    return {"wide": _draw(boxes, handed, _WIDE), "narrow": _draw(boxes, handed, _NARROW)}


def _with_breaks(words: str) -> Markup:
    """Let lines break inside long names, after dots and the like."""
    return Markup(re.sub(r"([,._/])(?=\w)", r"\1<wbr>", str(escape(words))))


def _draw(boxes: Sequence[Any], handed: Mapping[tuple[int, int], int], room: float) -> dict[str, Any]:
    laid = place(len(boxes), sorted(handed), room)
    lines = []
    entering: dict[int, list[float]] = {}
    for (_, target), points in laid.routes.items():
        entering.setdefault(target, []).append(points[-1][0])
    for (source, target), points in laid.routes.items():
        size, (x, y) = handed[source, target], points[-1]
        label = shown.size(size) if size else ""
        words = f"{boxes[source].title} to {boxes[target].title}" + (f": {label}" if label else "")
        above = 11 + 13 * (sorted(entering[target]).index(x) % 2)
        lines.append(
            Line(_path(points), x, y, label if len(entering[target]) <= _LABELS else "", y - above, size > 0, words)
        )
    return {"width": laid.width, "height": laid.height, "lines": lines, "centres": laid.centres}


def _path(points: Sequence[Point]) -> str:
    """Write a line: straight along rows and columns, curved between them."""
    path, before = f"M{points[0][0]:g} {points[0][1]:g}", points[0]
    for x, y in points[1:]:
        half = (before[1] + y) / 2
        straight = x == before[0] or y <= before[1]
        path += f"L{x:g} {y:g}" if straight else f"C{before[0]:g} {half:g} {x:g} {half:g} {x:g} {y:g}"
        before = (x, y)
    return path
