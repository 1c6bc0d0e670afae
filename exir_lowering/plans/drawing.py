"""Graphs drawn into HTML pages that need neither a network nor scripts: of plans, and of the methods of files."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from exir_lowering.plans import formatting as shown, layout

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
    box = layout.BOX_WIDTH, layout.BOX_HEIGHT
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
