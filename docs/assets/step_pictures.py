"""The pictures of docs/concepts, before and after each step: `python docs/assets/step_pictures.py docs/images/steps`.

It lowers one program with two methods, keeps what each step of the pipeline takes and makes, and draws that as SVG.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.export import ExportedProgram

import exir_lowering
from exir_lowering import graphs, pipeline

WIDTH, BOX, HEIGHT, GAP, TOP = 330, 250, 40, 16, 30
"""Of a picture, and of its boxes; the gap between boxes, and the room for the title of a frame."""

COLOURS = {"host": "#ffffff", "value": "#eef0f3", "0": "#dbe8ff", "1": "#d8f2df", "changed": "#fff0c7"}


METHODS = {"one": 1, "four": 4}
"""Batch sizes."""


class Classifier(torch.nn.Module):
    """A convolution, global pooling with `ceil_mode`, and the probability of the first N classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.Linear(16, 10)
        self.pool = torch.nn.AvgPool2d(32, ceil_mode=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take images, return probabilities."""
        pooled = self.pool(torch.relu(self.conv(x))).flatten(1)
        return torch.cumsum(torch.softmax(self.head(pooled), -1), -1).clamp(0.0, 0.5)


@dataclass(frozen=True)
class Box:
    """A value or an operator, with the boxes that it reads by their positions in the frame."""

    title: str
    detail: str
    colour: str
    reads: tuple[int, ...] = ()


Frame = tuple[str, list[Box]]
"""A title, and boxes from top to bottom."""


def graph(title: str, program: ExportedProgram, changed: frozenset[str] = frozenset()) -> Frame:
    """Return the inputs, operators and outputs of a program, with what it owns beside those who read it."""
    weights = {**program.graph_signature.inputs_to_parameters, **program.graph_signature.inputs_to_buffers}
    constants = set(program.graph_signature.inputs_to_lifted_tensor_constants)
    tags = list(dict.fromkeys(tag for node in program.graph.nodes if (tag := node.meta.get("delegation_tag"))))
    places: dict[Any, int] = {}
    boxes: list[Box] = []
    for node in program.graph.nodes:
        if node.name in weights or node.name in constants or node.op == "get_attr":
            continue
        if node.target is operator.getitem:
            places[node] = places[node.args[0]]
            continue
        reads = tuple(dict.fromkeys(places[one] for one in node.all_input_nodes if one in places))
        owned = [weights[one.name] for one in node.all_input_nodes if one.name in weights]
        places[node] = len(boxes)
        boxes.append(_box(node, reads, owned, changed, tags))
    return title, boxes


def _box(
    node: torch.fx.Node, reads: tuple[int, ...], owned: Sequence[str], changed: frozenset[str], tags: Sequence[str]
) -> Box:
    """Return the box of one node."""
    if node.op == "placeholder":
        return Box(f"input {node.name}", _shape(node), "value", reads)
    if node.op == "output":
        return Box("output", "", "value", reads)
    if "call_delegate" in str(node.target):
        number = node.args[0].name.rpartition("_")[2]  # type: ignore[union-attr]
        module = getattr(node.graph.owning_module, node.args[0].target)  # type: ignore[union-attr]
        size = len(getattr(module, "processed_bytes", b"") or b"")
        done = f"{module.backend_id}, {size:,} bytes" if size else "pending"
        return Box(f"call_delegate {number}", done, number, reads)
    name, tag = graphs.target_name(node.target), node.meta.get("delegation_tag")
    if node.name in changed:
        numbers = ", ".join(str(one) for one in node.args if not isinstance(one, torch.fx.Node))
        return Box(name, numbers, "changed", reads)
    if tag:
        return Box(name, f"{tag}: {_shape(node)}", str(tags.index(tag)), reads)
    return Box(name, _shape(node) + (f", {len(owned)} weights" if owned else ""), "host", reads)


def _shape(node: torch.fx.Node) -> str:
    """Return the type and sizes of what a node makes."""
    value = node.meta["val"]
    value = value[0] if isinstance(value, tuple | list) else value
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"


def draw(frames: Iterable[Frame]) -> str:
    """Return frames, one above the other, as SVG."""
    body, y = [], 8
    for title, boxes in frames:
        height = TOP + len(boxes) * (HEIGHT + GAP) - GAP + 12
        body.append(f'<rect x="8" y="{y}" width="{WIDTH - 16}" height="{height}" rx="8" class="frame"/>')
        body.append(f'<text x="{WIDTH / 2:g}" y="{y + 20}" class="title">{escape(title)}</text>')
        tops = [y + TOP + place * (HEIGHT + GAP) for place in range(len(boxes))]
        for place, box in enumerate(boxes):
            body += _lines(place, box, tops)
        for top, box in zip(tops, boxes, strict=True):
            body += _drawn(top, box)
        y += height + 12
    style = (
        "text{font:12px system-ui,sans-serif;text-anchor:middle;fill:#1c1e21}"
        ".title{font-weight:600}.name{font:600 12px ui-monospace,monospace}"
        ".frame{fill:#f8f9fb;stroke:#c5cad3}.box{stroke:#5b6472}.line{fill:none;stroke:#5b6472;stroke-width:1.4}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}">'
    return "\n".join([head, f"<style>{style}</style>", *body, "</svg>", ""])


def _lines(place: int, box: Box, tops: list[int]) -> Iterator[str]:
    """Draw the lines into a box: straight from the one above it, around the side from those further up."""
    middle, side = WIDTH / 2, (WIDTH + BOX) / 2
    for source in box.reads:
        start, end = tops[source] + HEIGHT, tops[place]
        if source == place - 1:
            path = f"M{middle:g} {start}V{end}"
        else:
            path = f"M{side:g} {start - HEIGHT / 2:g}C{side + 26:g} {start} {side + 26:g} {end} {side:g} {end + 12}"
        yield f'<path d="{path}" class="line"/>'


def _drawn(top: int, box: Box) -> Iterator[str]:
    """Draw a box with its two lines of text."""
    x = (WIDTH - BOX) / 2
    fill = COLOURS[box.colour]
    yield f'<rect x="{x:g}" y="{top}" width="{BOX}" height="{HEIGHT}" rx="5" class="box" fill="{fill}"/>'
    lower = 25 if not box.detail else 17
    yield f'<text x="{WIDTH / 2:g}" y="{top + lower}" class="name">{escape(box.title)}</text>'
    if box.detail:
        yield f'<text x="{WIDTH / 2:g}" y="{top + 33}">{escape(box.detail)}</text>'


def watch(programs: Mapping[str, ExportedProgram]) -> tuple[dict[str, list[Any]], exir_lowering.LoweredMethods]:
    """Lower programs, and return what each step made, in the order of its calls; and the result."""
    kept: dict[str, list[Any]] = {}

    def keeping(name: str, view: Callable[[Any], Any] = lambda result: result) -> Any:
        step = getattr(pipeline, name)

        def call(*given: Any, **named: Any) -> Any:
            result = step(*given, **named)
            kept.setdefault(name, []).append(view(result))
            return result

        return mock.patch.object(pipeline, name, call)

    # Later steps put payloads into the owner, so it is drawn at once.
    with keeping("to_edge"), keeping("rewrite"), keeping("tag"), keeping("extract", _extracted), keeping("_group"):
        return kept, exir_lowering.lower(programs, "xnnpack")


def _extracted(method: Any) -> tuple[Frame, list[Frame]]:
    """Return the owner and the partitions."""
    partitions = []
    for place, one in enumerate(method.partitions):
        title, boxes = graph(f"partition {place}", one.program)
        own = [replace(box, colour=str(place)) if box.colour == "host" else box for box in boxes]
        partitions.append((title, own))
    return graph("the owner", method.program), partitions


def main(folder: Path) -> None:
    """Lower the program, and write two pictures for each step."""
    model = Classifier().eval()
    programs = {name: torch.export.export(model, (torch.ones(size, 3, 32, 32),)) for name, size in METHODS.items()}
    kept, lowered = watch(programs)
    for name, frames in pictures(programs["one"], kept, lowered).items():
        (folder / f"{name}.svg").write_text(draw(frames), encoding="utf-8")


def pictures(
    given: ExportedProgram, kept: Mapping[str, list[Any]], lowered: exir_lowering.LoweredMethods
) -> dict[str, list[Frame]]:
    """Return the frames of each picture; of the two methods mostly the first."""
    (edge, *_), (rewritten, *_) = kept["to_edge"][0], kept["rewrite"][0]
    tagged, (owner, taken) = kept["tag"][0], kept["extract"][0]
    names = [{node.name for node in one.program.graph.nodes} for one in (edge, rewritten)]
    removed, made = frozenset(names[0] - names[1]), frozenset(names[1] - names[0])
    parts = [
        Box(one.id, f"{len(one.nodes)} of the operators", one.id.partition(":")[0][-1])
        for one in kept["_group"][0][0].partitions
    ]
    artifact = lowered.emit()
    return {
        "edge-before": [graph("as torch.export has it", given)],
        "edge-after": [graph("in Edge dialect", edge.program)],
        "rewrite-before": [graph("before", edge.program, removed)],
        "rewrite-after": [graph("after", rewritten.program, made)],
        "tag-before": [graph("no operator is claimed", rewritten.program)],
        "tag-after": [graph("the partitioner's tags", tagged.program)],
        "extract-before": [graph("the partitioner's tags", tagged.program)],
        "extract-after": [owner, *taken],
        "group-before": [(f"method {name}", [one for one in parts if one.title.startswith(name)]) for name in METHODS],
        "group-after": [("one call of XnnpackBackend", list(_payloads(parts, lowered)))],
        "splice-before": [owner],
        "splice-after": [graph("the lowered program", lowered.programs["one"])],
        "emit-before": [graph(f"method {name}", lowered.programs[name]) for name in METHODS],
        "emit-after": [("one .pte file", list(_bytes(artifact)))],
    }


def _payloads(partitions: Iterable[Box], lowered: exir_lowering.LoweredMethods) -> Iterator[Box]:
    """Return the boxes of partitions, with the sizes of their payloads."""
    modules = [
        module
        for program in lowered.programs.values()
        for module in program.graph_module.children()
        if hasattr(module, "processed_bytes")
    ]
    for box, module in zip(partitions, modules, strict=True):
        yield replace(box, detail=f"payload of {len(module.processed_bytes):,} bytes")


def _bytes(artifact: exir_lowering.Artifact) -> Iterator[Box]:
    """Return a box for each kind of bytes in the file."""
    report = exir_lowering.inspect(artifact.buffer)
    for kind, size in report.bytes_by_kind().items():
        yield Box(kind, f"{size:,} bytes", "value")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
