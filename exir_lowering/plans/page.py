"""A plan as an HTML page that needs neither a network nor scripts: what helps, a picture, every operator."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import networkx as nx
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from exir_lowering.plans import formatting as shown, views
from exir_lowering.plans.findings import find
from exir_lowering.plans.picture import Picture, picture
from exir_lowering.plans.planned import MethodPlan, PlannedNode

if TYPE_CHECKING:
    from exir_lowering.plans.lowering_plan import LoweringPlan

BOX_WIDTH, BOX_HEIGHT = 260.0, 66.0
_GAP_X, _GAP_Y, _MARGIN = 28.0, 46.0, 12.0
_BEND = 200.0  # how far to the side a line is drawn that passes rows: beside the box above its end
_COLOURS = 8


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
    filters: dict[str, Any] = {name: getattr(shown, name) for name in ("size", "operations", "head", "tail")}
    # Lines may break inside long names, after dots and the like.
    filters["breaks"] = lambda words: Markup(re.sub(r"([,._/])(?=\w)", r"\1<wbr>", str(escape(words))))
    environment.filters.update(filters)
    style, _, _ = loader.get_source(environment, "page.css")
    digest = "sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    colours: dict[str | None, str] = {backend: f"b{i % _COLOURS}" for i, backend in enumerate(plan.backend_ids)}
    return environment.get_template("page.html.jinja").render(
        plan=plan,
        facts=views.facts(plan),
        methods=list(map(_show, plan.methods)),
        colours={**colours, None: "host"},
        box=(BOX_WIDTH, BOX_HEIGHT),
        style=style,
        style_hash=digest,
    )


def _show(method: MethodPlan) -> dict[str, Any]:
    drawn = picture(method)
    return {
        "plan": method,
        "shares": views.coverages(method),
        "destinations": views.destinations(method),
        "memory": None if method.memory is None else views.describe_memory(method.memory),
        "sections": list(find(method)),
        "vertices": drawn.vertices,
        "operators": [shown.count_operators(vertex.nodes) for vertex in drawn.vertices],
        "drawing": draw(drawn),
        "partitions": {partition.id: partition for partition in method.partitions},
        "rows": _rows,
    }


def draw(drawn: Picture) -> dict[str, Any]:
    """Return where the vertices of a picture are, each below all that it reads, and the lines between them."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(drawn.vertices)))
    graph.add_edges_from(drawn.edges)
    row, x = dict[int, int](), dict[int, float]()
    for number, generation in enumerate(nx.topological_generations(graph)):
        read = {vertex: [x[other] for other in graph.predecessors(vertex)] for vertex in generation}
        generation.sort(key=lambda vertex: (sum(read[vertex]) / max(1, len(read[vertex])), vertex))
        for place, vertex in enumerate(generation):
            row[vertex], x[vertex] = number, (place - (len(generation) - 1) / 2) * (BOX_WIDTH + _GAP_X)
    lines = list[dict[str, Any]]()
    for (source, target), size in drawn.edges.items():
        start = row[source] * (BOX_HEIGHT + _GAP_Y) + BOX_HEIGHT
        end, bend = row[target] * (BOX_HEIGHT + _GAP_Y), _BEND if row[target] > row[source] + 1 else 0.0
        curve = f"C{x[source] + bend:g} {start + _GAP_Y:g} {x[target] + bend:g} {end - _GAP_Y:g}"
        path = f"M{x[source]:g} {start:g}{curve} {x[target]:g} {end:g}"
        middle = (x[source] + x[target]) / 2 + bend * 3 / 4, (start + end) / 2
        words = f"{drawn.vertices[source].title} to {drawn.vertices[target].title}"
        lines.append({"path": path, "tip": (x[target], end), "middle": middle, "words": words, "size": size})
    sides = [place + half for place in x.values() for half in (-BOX_WIDTH / 2, BOX_WIDTH / 2)]
    sides += [line["middle"][0] + _GAP_X for line in lines]
    left, right = min(sides, default=0.0) - _MARGIN, max(sides, default=0.0) + _MARGIN
    return {
        "left": left,
        "width": right - left,
        "height": (max(row.values(), default=0) + 1) * (BOX_HEIGHT + _GAP_Y),
        "corners": [(x[i] - BOX_WIDTH / 2, row[i] * (BOX_HEIGHT + _GAP_Y)) for i in range(len(drawn.vertices))],
        "lines": lines,
    }


def _rows(nodes: Sequence[PlannedNode]) -> list[tuple[str, str, shown.Place, list[str]]]:
    """Return equal operators of a module and a source line together, with the names of all."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for node in nodes:
        rows.setdefault((node.operator, node.module, node.source), []).append(node.name)
    return [(operator, module, shown.place(source), names) for (operator, module, source), names in rows.items()]
