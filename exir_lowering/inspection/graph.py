"""The graph of a method: a box for each call of a delegate, and for what the host does between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exir_lowering.plans import drawing, folding, naming
from exir_lowering.plans.picture import Picture, Vertex
from exir_lowering.plans.planned import PlannedNode
from exir_lowering.pte.printing import printable

if TYPE_CHECKING:
    from exir_lowering.inspection.report import Call, MethodReport

_MOST = 100_000
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
    read = sum(len(method.delegates[number].operators) for number in called if number is not None) <= _MOST
    vertices = tuple(_vertex(method, i, group, read) for i, group in enumerate(groups))
    folded = folding.fold(Picture(vertices, ()))
    boxes = [_box(box, [call for one in box.vertices for call in groups[int(one.id)]]) for box in folded]
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


def _vertex(method: MethodReport, number: int, group: Sequence[Call], read: bool) -> Vertex:
    if group[0].delegate is None:
        nodes = [_node(call.name, "".join(call.modules[:1])) for call in group]
        return Vertex(str(number), "host", "", None, tuple(nodes))
    delegate, modules = method.delegates[group[0].delegate], group[0].modules or ("",)
    names = [one.name for one in delegate.operators] if read and delegate.operators else ["unread payload"]
    # Of which of the modules an operator of a payload is, only the order of both says.
    nodes = [_node(name, modules[i * len(modules) // len(names)]) for i, name in enumerate(names)]
    return Vertex(str(number), "partition", "", printable(delegate.backend), tuple(nodes))


def _node(operator: str, module: str) -> PlannedNode:
    name, path = operator.replace("::", "."), ".".join(module.split(".", _DEPTH)[:_DEPTH])
    name += ".default" * (name != operator and name.count(".") == 1)
    return PlannedNode("", printable(name), None, printable(path), "", (), 0, 0)


def _box(box: folding.Box, calls: Sequence[Call]) -> Box:
    read, written = ({name for call in calls for name in getattr(call, word)} for word in ("reads", "writes"))
    used = {"reads and writes": read & written, "reads": read - written, "writes": written - read}
    state = printable("; ".join(f"{words} {', '.join(sorted(names))}" for words, names in used.items() if names))
    where = f"{box.where}; {state}" if state else box.where
    return Box(_title(box, calls), box.operators, where, box.backend, box.vertices, tuple(calls), state)


def _title(box: folding.Box, calls: Sequence[Call]) -> str:
    """Return the modules of a box; where none is known, the numbers of its instructions, or of its delegate."""
    title = naming.name_modules(node.module for node in box.nodes)
    if not title and len(calls) == 1:
        title = f"instruction {calls[0].number}" if calls[0].delegate is None else f"delegate {calls[0].delegate}"
    title = title or f"instructions {calls[0].number}-{calls[-1].number}"
    return f"{box.times:,} x {title}" if box.times > 1 else title
