"""A plan as text, JSON and a Graphviz graph; `page` makes the HTML page."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from exir_lowering.plans import formatting as shown
from exir_lowering.plans.findings import Finding, find, name_partitions
from exir_lowering.plans.picture import picture
from exir_lowering.plans.planned import MethodPlan, PlannedMemory
from exir_lowering.pte.printing import printable

if TYPE_CHECKING:
    from exir_lowering.plans.lowering_plan import LoweringPlan


VERSION = 1
"""Increased when a field of the JSON changes its meaning or is removed."""


def to_json(plan: LoweringPlan) -> str:
    """Return a plan as JSON; equal plans give equal text.

    Args:
        plan: The plan.

    Returns:
        `{"version": 1, "methods": [...]}`: the fields of `MethodPlan` and of what it holds, under their names, and for
        each method the `coverage` of its `operators`, `flops` and `weights`, 0 to 1, or null if it has none. A report
        has additional fields.
    """
    return json.dumps(as_data(plan), indent=2)


def as_data(plan: LoweringPlan) -> dict[str, Any]:
    """Return what `to_json` writes."""
    more = {field.name: plain(getattr(plan, field.name)) for field in fields(plan) if field.name != "methods"}
    methods = [{"name": one.name, "coverage": coverages(one), **plain(one)} for one in plan.methods]
    return {"version": VERSION, "methods": methods, **more}


def coverages(method: MethodPlan) -> dict[str, float | None]:
    """Return the delegated shares of a method, 0 to 1; None where the total is zero."""
    return {
        "operators": method.coverage if method.nodes else None,
        "flops": method.flops_coverage if any(node.flops for node in method.nodes) else None,
        "weights": method.weights_coverage if method.weight_bytes else None,
    }


def plain(value: Any) -> Any:
    """Return values as JSON can hold them."""
    if is_dataclass(value) and not isinstance(value, type):
        names = (field.name.lstrip("_") for field in fields(value))  # a property tells what a private field keeps
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): plain(value[key]) for key in sorted(value)}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value.hex() if isinstance(value, bytes) else value


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
        yield f"  subgraph cluster_{i} {{"
        yield f"    label={_quote(method.name)};"
        for j, vertex in enumerate(drawn.vertices):
            colour = colours[vertex.backend] if vertex.backend is not None else "#e6e6e6"
            text = _quote(f"{vertex.title}\n{shown.count_operators(vertex.nodes)}\n{vertex.where}")
            yield f'    m{i}_v{j} [label={text}, fillcolor="{colour}"];'
        for (source, target), size in drawn.edges.items():
            style = f"label={_quote(shown.size(size))}" if size else "style=dashed"
            yield f"    m{i}_v{source} -> m{i}_v{target} [{style}];"
        yield "  }"
    yield "}"


# Graphviz interprets backslashes and HTML entities in labels, and rejects NUL.
_ESCAPED = str.maketrans({"\0": "�", "&": "&amp;", "\\": "\\\\", '"': '\\"', "\r": "", "\n": "\\n"})


def _quote(text: str) -> str:
    return f'"{text.translate(_ESCAPED)}"'


LINES = 25
"""How many lines a summary has at most."""

_FEW = 3  # of how many methods a summary says how long they take, and how many states it shows

_MORE = "All of it: to_text(everything=True), or --all."


def to_text(plan: LoweringPlan, width: int = 120, *, everything: bool = False, most: int = LINES) -> str:
    """Return a plan as plain text.

    Args:
        plan: The plan.
        width: The width of a line in characters; only a word that is longer makes a longer line.
        everything: Whether to list every operator and partition, not only what matters most.
        most: How many lines there are at most, if that is not everything.
    """
    lines = _all(plan, width) if everything else _summary(plan, width, most)
    return "\n".join(printable(line.rstrip()) for line in lines) + "\n"


def facts(plan: LoweringPlan) -> dict[str, str]:
    """Return what was planned with what: the models, the partitioners, the versions; what is known of it."""
    found = {
        "model": ", ".join(dict.fromkeys(method.model.rpartition(".")[2] for method in plan.methods)),
        "partitioners": ", ".join(dict.fromkeys(name for method in plan.methods for name in method.partitioners)),
        "versions": ", ".join(f"{name} {version}" for name, version in plan.versions.items()),
    }
    return {name: value for name, value in found.items() if value}


def destinations(method: MethodPlan, none: str = "no partition") -> str:
    """Return how many partitions go to which backend."""
    backends = Counter(partition.backend_id for partition in method.partitions)
    return ", ".join(f"{count:,} x {backend}" for backend, count in backends.items()) or none


def describe_memory(memory: PlannedMemory | None) -> str:
    """Return how much a method takes, in short."""
    if memory is None:
        return "not known"
    whole = f", {shown.size(memory.device.peak)} in all" if memory.device is not None else ""
    return f"{shown.size(memory.bytes)} ({shown.size(memory.peak)} in use at the peak){whole}"


def _wrap(text: str, width: int, indent: int = 0) -> list[str]:
    """Break a text between words only: a path or an operator stays in one piece."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _memory(method: MethodPlan, width: int) -> list[str]:
    return [] if method.memory is None else _wrap(f"Planned memory {describe_memory(method.memory)}", width, 2)


def _warnings(plan: LoweringPlan, width: int) -> list[str]:
    return [line for text in plan.warnings for line in _wrap(f"Warning: {text}", width)]


def _head(plan: LoweringPlan) -> str:
    known = facts(plan)
    words = [f"{word} {known[name]}" for word, name in (("of", "model"), ("with", "partitioners")) if name in known]
    return " ".join(["Lowering plan", *words])


def _method(method: MethodPlan) -> str:
    shares = ", ".join(
        f"{name} {'-' if share is None else f'{share:.1%}'}" for name, share in coverages(method).items()
    )
    where = f"{method.delegated:,} in {destinations(method)}, {len(method.host):,} on the host"
    return f"{method.name}: {shown.many(len(method.nodes), 'operator')}, {where}; delegated: {shares}"


# -- the summary -------------------------------------------------------------------------------------------------------


def _summary(plan: LoweringPlan, width: int, most: int) -> list[str]:
    end = _wrap(_MORE, width)
    lines = [*_wrap(_head(plan), width)[:3], *_warnings(plan, width)[: 3 * _FEW]]
    if plan.states:
        lines.append(f"State ({len(plan.states):,})")
        lines += [line for state in plan.states[:_FEW] for line in _wrap(str(state), width, 2)][: 2 * _FEW]
    heads = [_wrap(_method(method), width) for method in plan.methods]
    if len(heads) <= _FEW:
        heads = [[*head, *_memory(method, width)] for head, method in zip(heads, plan.methods, strict=True)]
    room = most - len(lines) - len(end) - 1
    kept = 0
    while kept < len(heads) and sum(map(len, heads[: kept + 1])) <= room:
        kept += 1
    left = room - sum(map(len, heads[:kept]))
    for i, method in enumerate(plan.methods[:kept]):
        sections = _sections(method, left // (kept - i), width)
        left -= len(sections)
        lines += [*heads[i], *sections]
    if kept < len(heads):
        lines.append(f"and {shown.many(len(heads) - kept, 'more method')}")
    return [*lines, *end]


def _sections(method: MethodPlan, room: int, width: int) -> list[str]:
    """Return what most people ask for, as far as it fits; what to do, which is shown last, gets its room first."""
    found = list[str]()
    for section in reversed([*itertools.takewhile(lambda one: one.part == "brief", find(method))]):
        block = _wrap(f"{section.title} ({len(section.findings):,})", width, 2)
        shown_at_all = len(block)
        for lines in (_wrap(_in_short(finding), width, 4) for finding in section.findings):
            block += lines if len(found) + len(block) + len(lines) <= room else ()
        found = [*block, *found] if len(block) > shown_at_all else found
    return found


def _in_short(finding: Finding) -> str:
    lines = finding.lines()
    more = f" and {shown.many(len(lines) - 1, 'more line')}" if len(lines) > 1 else ""
    return f"{finding.head}: {finding.why}" + (f" ({lines[0].short}{more})" if lines else "")


# -- everything --------------------------------------------------------------------------------------------------------


def _all(plan: LoweringPlan, width: int) -> Iterator[str]:
    yield from (*_wrap(_head(plan), width), *_warnings(plan, width))
    if plan.states:
        yield from ("", f"State ({len(plan.states):,})")
        for state in plan.states:
            yield from _wrap(str(state), width, 2)
    for method in plan.methods:
        yield ""
        yield from _wrap(_method(method), width)
        yield from _memory(method, width)
        if method.memory is not None and method.memory.device is not None:
            yield from ("", "  On a device")
            yield from (f"    {size:>13}  {what}" for _, size, what in method.memory.device.rows())
        for section in find(method):
            yield from ("", *_wrap(f"{section.title} ({len(section.findings):,})", width, 2))
            for finding in section.findings:
                yield from _wrap(f"{finding.head}: {finding.why}", width, 4)
                for place, names in finding.by_place().items():
                    parts = [part for part in (place.full, ", ".join(filter(None, names))) if part]
                    yield from _wrap(": ".join(parts), width, 8)
        if method.partitions:
            yield from ("", f"  Partitions ({len(method.partitions):,})")
            yield from _partitions(method, width)
    if plan.versions:
        yield from ("", *_wrap(f"Made with {facts(plan)['versions']}", width))


def _partitions(method: MethodPlan, width: int) -> Iterable[str]:
    titles = name_partitions(method)
    by_name = {node.name: node for node in method.nodes}
    for one in method.partitions:
        operators = shown.count_operators((by_name[name] for name in one.nodes), len(one.nodes))
        handed = f"{shown.size(one.bytes_in)} in, {shown.size(one.bytes_out)} out"
        costs = f"{shown.size(one.weight_bytes)} of weights, {handed}, {shown.operations(one.flops)} flops"
        yield from _wrap(f"{titles[one.id]} ({one.id}): {one.backend_id}, {operators}; {costs}", width, 4)
