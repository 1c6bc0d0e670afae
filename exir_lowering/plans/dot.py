"""A plan as a Graphviz graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from exir_lowering.plans import formatting, naming
from exir_lowering.plans.picture import picture

if TYPE_CHECKING:
    from exir_lowering.plans.lowering_plan import LoweringPlan

_COLOURS = ("#cfe2ff", "#ffe0b8", "#cdeccf", "#f5cfe3", "#e0d6fa", "#c9ecee", "#f3eab0", "#f7d0c8")


def to_dot(plan: LoweringPlan) -> str:
    """Return a plan in the DOT language: a cluster for each method, with partitions and host regions.

    Args:
        plan: The plan.
    """
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: LoweringPlan) -> Iterator[str]:
    backends = dict.fromkeys(partition.backend_id for method in plan.methods for partition in method.partitions)
    colours = {backend: _COLOURS[i % len(_COLOURS)] for i, backend in enumerate(backends)}
    yield "digraph {"
    yield '  node [shape=box, style="filled,rounded", fontname="sans-serif"];'
    yield '  edge [fontname="sans-serif", fontsize=10];'
    for i, method in enumerate(plan.methods):
        drawn = picture(method)
        names = {vertex.id: f"m{i}_v{j}" for j, vertex in enumerate(drawn.vertices)}
        yield f"  subgraph cluster_{i} {{"
        yield f"    label={_quote(method.name)};"
        for vertex in drawn.vertices:
            colour = colours[vertex.backend] if vertex.backend is not None else "#e6e6e6"
            text = _quote(f"{vertex.title}\n{naming.count_operators(vertex.nodes)}\n{vertex.where}")
            yield f'    {names[vertex.id]} [label={text}, fillcolor="{colour}"];'
        for edge in drawn.edges:
            style = f"label={_quote(formatting.size(edge.bytes))}" if edge.bytes else "style=dashed"
            yield f"    {names[edge.source]} -> {names[edge.target]} [{style}];"
        yield "  }"
    yield "}"


def _quote(text: str) -> str:
    """Quote a text: Graphviz interprets backslashes and HTML entities in labels, and rejects NUL."""
    for raw, escaped in (("\0", "�"), ("&", "&amp;"), ("\\", "\\\\"), ('"', '\\"'), ("\r", ""), ("\n", "\\n")):
        text = text.replace(raw, escaped)
    return f'"{text}"'
