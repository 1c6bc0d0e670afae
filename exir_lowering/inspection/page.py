"""A report as an HTML page that needs neither a network nor scripts, with a graph of each method.

The graph has a box for each call of a delegate, and for what the host does between two of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exir_lowering.inspection import text
from exir_lowering.plans import drawing, formatting
from exir_lowering.plans.picture import Box as FoldedBox, Vertex, fold
from exir_lowering.plans.planned import PlannedNode
from exir_lowering.pte.printing import printable

if TYPE_CHECKING:
    from exir_lowering.inspection.report import Arena, Call, FileReport, MethodReport, PlannedTensor


_MOST_OPERATORS = 100_000
"""How many operators of payloads are counted: a file may call one payload as often as it likes."""

_DEPTH = 12
"""How many parts of a module's path are looked at."""


@dataclass(frozen=True, slots=True)
class Box:
    """Instructions that follow one another, as a picture shows them."""

    title: str
    operators: str
    where: str  # they run, and the state that they read and write
    backend: str | None
    vertices: tuple[Vertex, ...]
    calls: tuple[Call, ...]
    state: str  # "" for none


def draw(method: MethodReport) -> tuple[list[Box], dict[str, dict[str, Any]]]:
    """Return the boxes of a method in the order of execution, and where they are on a screen and on a phone.

    A box is a stretch of that order, so boxes never form a cycle: what a loop reads of its last round is not drawn.
    """
    groups = _group(method)
    called = [group[0].delegate for group in groups]
    read = sum(len(method.delegates[number].operators) for number in called if number is not None) <= _MOST_OPERATORS
    left = iter(groups)
    boxes = [
        _box(box, [call for _ in box.vertices for call in next(left)])
        for box in fold([_vertex(method, group, read) for group in groups])
    ]
    owner = {call.number: i for i, box in enumerate(boxes) for call in box.calls}
    handed: dict[tuple[int, int], dict[tuple[int, int], int]] = {}  # from box to box the sizes of values, each once
    for flow in method.flows:
        if owner[flow.source] != owner[flow.target]:
            handed.setdefault((owner[flow.source], owner[flow.target]), {})[flow.source, flow.value] = flow.bytes
    return boxes, drawing.draw(boxes, {ends: sum(sizes.values()) for ends, sizes in handed.items()})


def _group(method: MethodReport) -> list[list[Call]]:
    """Return the calls of delegates, and the others between two of them: by module if there is no delegate."""
    groups: list[list[Call]] = []
    for call in method.calls:
        on_host = groups and call.delegate is None and groups[-1][-1].delegate is None
        if on_host and (method.delegates or call.modules in ((), groups[-1][0].modules)):
            groups[-1].append(call)
        else:
            groups.append([call])
    return groups


def _vertex(method: MethodReport, group: Sequence[Call], read: bool) -> Vertex:
    if group[0].delegate is None:
        nodes = [_node(call.name, "".join(call.modules[:1])) for call in group]
        return Vertex("", None, tuple(nodes))
    delegate, modules = method.delegates[group[0].delegate], group[0].modules or ("",)
    names = [one.name for one in delegate.operators] if read and delegate.operators else ["unread payload"]
    # Of which of the modules an operator of a payload is, only the order of both says.
    nodes = [_node(name, modules[i * len(modules) // len(names)]) for i, name in enumerate(names)]
    return Vertex("", printable(delegate.backend), tuple(nodes))


def _node(operator: str, module: str) -> PlannedNode:
    name, path = operator.replace("::", "."), ".".join(module.split(".", _DEPTH)[:_DEPTH])
    name += ".default" * (name != operator and name.count(".") == 1)
    return PlannedNode("", printable(name), None, printable(path), "", (), 0, 0)


def _box(box: FoldedBox, calls: Sequence[Call]) -> Box:
    read, written = ({name for call in calls for name in getattr(call, word)} for word in ("reads", "writes"))
    used = {"reads and writes": read & written, "reads": read - written, "writes": written - read}
    state = printable("; ".join(f"{words} {', '.join(sorted(names))}" for words, names in used.items() if names))
    where = f"{box.where}; {state}" if state else box.where
    return Box(_title(box, calls), box.operators, where, box.backend, box.vertices, tuple(calls), state)


def _title(box: FoldedBox, calls: Sequence[Call]) -> str:
    """Return the modules of a box; where none is known, the numbers of its instructions, or of its delegate."""
    title = formatting.name_modules(node.module for node in box.nodes)
    if not title and len(calls) == 1:
        title = f"instruction {calls[0].number}" if calls[0].delegate is None else f"delegate {calls[0].delegate}"
    title = title or f"instructions {calls[0].number}-{calls[-1].number}"
    return f"{box.times:,} x {title}" if box.times > 1 else title


_MOST = 80
"""How many boxes the picture of the bytes has; smaller ones are one box for each kind."""

_TENSORS = 2000
"""How many tensors the picture of a memory has, the largest."""


@dataclass(frozen=True, slots=True)
class Rectangle:
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
        graphs=[draw(method) for method in report.methods],
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


def _treemap(report: FileReport) -> list[Rectangle]:
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
        made.append(Rectangle(*place, kind.replace(" ", "-"), label, f"{label}: {size:,} bytes ({kind})"))
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


def _memories(method: MethodReport) -> list[tuple[Arena, list[Rectangle]]]:
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
            boxes.append(
                Rectangle(*place, *extent, kind, name, f"{title}, instructions {tensor.first} to {tensor.last}")
            )
        drawn.append((arena, boxes))
    return drawn
