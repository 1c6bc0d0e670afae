"""A plan as an HTML page that needs neither a network nor scripts."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from exir_lowering.plans import folding, formatting as shown, layout, naming, text
from exir_lowering.plans.data import coverages
from exir_lowering.plans.findings import find
from exir_lowering.plans.picture import picture
from exir_lowering.plans.planned import MethodPlan, PlannedNode

if TYPE_CHECKING:
    from exir_lowering.plans.lowering_plan import LoweringPlan

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


def to_html(plan: LoweringPlan) -> str:
    """Return a plan as a page: what helps, the partitions as a picture, every operator with its reasons.

    All names in the plan are shown as text: they are escaped, and a content security policy lets the browser run and
    load nothing.

    Args:
        plan: The plan.
    """
    loader = PackageLoader("exir_lowering.plans", "assets")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        size=shown.size, operations=shown.operations, head=shown.head, tail=shown.tail, breaks=_with_breaks
    )
    style = loader.get_source(environment, "page.css")[0]
    return environment.get_template("page.html.jinja").render(
        plan=plan,
        facts=text.facts(plan),
        methods=[_show(method, len(plan.methods) > 1) for method in plan.methods],
        colours={**{backend: f"b{i % _COLOURS}" for i, backend in enumerate(plan.backend_ids)}, None: "host"},
        box=(layout.BOX_WIDTH, layout.BOX_HEIGHT),
        style=style,
        style_hash="sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
    )


def _with_breaks(words: str) -> Markup:
    """Let lines break inside long names, after dots and the like."""
    return Markup(re.sub(r"([,._/])(?=\w)", r"\1<wbr>", str(escape(words))))


def _show(method: MethodPlan, named: bool) -> dict[str, Any]:
    drawn = picture(method)
    boxes = folding.fold(drawn)
    handed = folding.edges(drawn, boxes)
    return {
        "plan": method,
        "shares": coverages(method),
        "destinations": text.destinations(method),
        "predicted": text.predicted(method),
        "sections": list(find(method, named=named)),
        "boxes": boxes,
        "drawings": {"wide": _draw(boxes, handed, _WIDE), "narrow": _draw(boxes, handed, _NARROW)},
        "partitions": {f"partition:{partition.id}": partition for partition in method.partitions},
        "rows": _rows,
    }


def _draw(boxes: Sequence[folding.Box], handed: dict[tuple[int, int], int], room: float) -> dict[str, Any]:
    laid = layout.place(len(boxes), sorted(handed), room)
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


def _path(points: Sequence[layout.Point]) -> str:
    """Write a line: straight along rows and columns, curved between them."""
    path, before = f"M{points[0][0]:g} {points[0][1]:g}", points[0]
    for x, y in points[1:]:
        half = (before[1] + y) / 2
        straight = x == before[0] or y <= before[1]
        path += f"L{x:g} {y:g}" if straight else f"C{before[0]:g} {half:g} {x:g} {half:g} {x:g} {y:g}"
        before = (x, y)
    return path


def _rows(nodes: Sequence[PlannedNode]) -> list[tuple[str, str, naming.Place, list[str]]]:
    """Return equal operators of a module and a source line together, with the names of all."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for node in nodes:
        rows.setdefault((node.operator, node.module, node.source), []).append(node.name)
    return [(operator, module, naming.place(source), names) for (operator, module, source), names in rows.items()]
