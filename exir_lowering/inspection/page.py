"""A report as an HTML page that needs neither a network nor scripts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exir_lowering.inspection import graph, text
from exir_lowering.plans import drawing
from exir_lowering.pte.printing import printable

if TYPE_CHECKING:
    from exir_lowering.inspection.report import Arena, FileReport, MethodReport, PlannedTensor

_MOST = 80
"""How many boxes the picture of the bytes has; smaller ones are one box for each kind."""

_TENSORS = 2000
"""How many tensors the picture of a memory has, the largest."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in a picture, in percent of it."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    label: str
    title: str


def to_html(report: FileReport) -> str:
    """Return a report as a page: its bytes, its methods with their calls, and their memory over time.

    All names in the file are shown as text: they are escaped, and a content security policy lets the browser run and
    load nothing.
    """
    return drawing.render(
        "exir_lowering.inspection",
        {"printable": printable, "spec": text.spec},
        report=report,
        graphs=[graph.draw(method) for method in report.methods],
        colours=drawing.colours(map(printable, report.backends)),
        summary=report.summary(width=10_000).splitlines(),
        facts=text.facts(report.provenance) if report.provenance is not None else [],
        families=text.family_rows(report),
        columns=text.FAMILY,
        boxes=_treemap(report),
        memories={method.name: _memories(method) for method in report.methods},
        names={
            method.name: {tensor.value: tensor.name for tensor in method.memory.tensors} for method in report.methods
        },
    )


def _treemap(report: FileReport) -> list[Box]:
    sizes: Counter[tuple[str, str]] = Counter()
    for part in report.ranges:
        sizes[part.kind, part.what] += part.size
    ordered = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    merged = Counter(dict(ordered[:_MOST]))
    for (kind, _), size in ordered[_MOST:]:
        merged[kind, "others"] += size
    items = sorted(merged.items(), key=lambda item: (-item[1], item[0]))
    places = _squarify([size for _, size in items], (0.0, 0.0, 100.0, 100.0))
    made = []
    for ((kind, what), size), place in zip(items, places, strict=True):
        label = printable(what or kind)
        made.append(Box(*place, kind.replace(" ", "-"), label, f"{label}: {size:,} bytes ({kind})"))
    return made


def _squarify(
    sizes: Sequence[int], room: tuple[float, float, float, float]
) -> Iterator[tuple[float, float, float, float]]:
    """Yield a rectangle for each size, the largest first: rows along the shorter side, each as square as it can be."""
    x, y, width, height = room
    start, left = 0, sum(sizes)
    while start < len(sizes) and left:
        short = min(width, height)
        count, area = 1, width * height / left
        while start + count < len(sizes):
            now, more = (sizes[start : start + number] for number in (count, count + 1))
            if _worst(more, short, area) > _worst(now, short, area):
                break
            count += 1
        row = sizes[start : start + count]
        thick = sum(row) * area / short
        at = 0.0
        for size in row:
            long = size * area / thick
            yield (x, y + at, thick, long) if width >= height else (x + at, y, long, thick)
            at += long
        if width >= height:
            x, width = x + thick, width - thick
        else:
            y, height = y + thick, height - thick
        start, left = start + count, left - sum(row)


def _worst(row: Sequence[int], side: float, area: float) -> float:
    """Return how far from a square the worst rectangle of a row is."""
    thick = sum(row) * area / side
    return max(max(thick * thick / (size * area), size * area / (thick * thick)) for size in row)


def _memories(method: MethodReport) -> list[tuple[Arena, list[Box]]]:
    """Return what each planned memory has over time: instructions to the right, bytes down."""
    steps = len(method.calls) + 1
    drawn = []
    tensors: dict[int, list[PlannedTensor]] = defaultdict(list)
    for tensor in sorted(method.memory.tensors, key=lambda tensor: -tensor.bytes):
        if tensor.bytes:
            tensors[tensor.arena].append(tensor)
    for arena in method.memory.arenas:
        boxes, peak = [], set(arena.tensors)
        for tensor in tensors[arena.number][:_TENSORS]:
            name = printable(tensor.name)
            title = f"{name}: {tensor.dtype} {list(tensor.shape)}, {tensor.bytes:,} bytes at byte {tensor.offset:,}"
            place = 100 * tensor.first / steps, 100 * tensor.offset / arena.bytes
            extent = 100 * (tensor.last - tensor.first + 1) / steps, 100 * tensor.bytes / arena.bytes
            kind = "peak" if tensor.value in peak else "tensor"
            boxes.append(Box(*place, *extent, kind, name, f"{title}, instructions {tensor.first} to {tensor.last}"))
        drawn.append((arena, boxes))
    return drawn
