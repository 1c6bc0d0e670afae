"""A plan as plain text."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from exir_lowering.model import RefusedRewrite, Rewriting
from exir_lowering.plans import formatting as shown
from exir_lowering.plans.data import coverages, to_json
from exir_lowering.plans.planned import HostCost, HostNode, MethodPlan, PlannedPartition

if TYPE_CHECKING:
    from exir_lowering.plans.lowering_plan import LoweringPlan

__all__ = ["table", "to_json", "to_text"]

MOST = 30
"""How many rows of a list are shown; the others are counted."""

_SOURCE = 120
"""How many characters of a source line are shown."""

_WIDE = 100
"""How many characters the table of partitions needs; on narrower lines it is a list."""


def table(plan: LoweringPlan) -> Table:
    """Return the summary: how much of each method goes where. It fits 60 columns."""
    summary = Table(title="Lowering plan", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in ("method", "partitions", "ops\nin\nthem", "ops\non\nhost", "share"):
        summary.add_column(column, justify="left" if column in ("method", "partitions") else "right", overflow="fold")
    for method in plan.methods:
        backends = Counter(partition.backend_id for partition in method.partitions)
        summary.add_row(
            Text(method.name),
            Text("\n".join(f"{count:,} x {backend}" for backend, count in backends.items()) or "none"),
            f"{method.delegated:,}",
            f"{len(method.host):,}",
            "\n".join(_shares(method)),
        )
    return summary


def _shares(method: MethodPlan) -> Iterator[str]:
    for name, share in coverages(method).items():
        yield f"{'ops' if name == 'operators' else name} {'-' if share is None else f'{share:.1%}'}"


def to_text(plan: LoweringPlan, width: int = 120) -> str:
    """Return a plan as plain text.

    Args:
        plan: The plan.
        width: The width of a line in characters.
    """
    out = io.StringIO()
    # The terminal and the environment (FORCE_COLOR, COLUMNS) must not affect the text.
    console = Console(file=out, width=width, force_terminal=False, color_system=None, highlight=False, emoji=False)
    console.print(table(plan))
    if plan.states:
        for part in (*_section("State", len(plan.states)), *_list_nodes([("-", str(each)) for each in plan.states])):
            console.print(part, markup=False)
    for method in plan.methods:
        for part in _parts(method, width):
            console.print(part, markup=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _parts(method: MethodPlan, width: int) -> Iterator[RenderableType]:
    backends = {partition.id: partition.backend_id for partition in method.partitions}
    yield Text(f"\n{method.name}: {shown.many(len(method.nodes), 'operator')}")
    yield from _prediction(method)
    if method.partitions:
        yield from _section("Partitions", len(method.partitions))
        if width < _WIDE:
            yield from _list_nodes([(partition.id, _in_words(partition)) for partition in method.partitions])
        else:
            yield _indent(_partitions(method.partitions[:MOST]))
            yield from _rest(len(method.partitions))
    if method.host:
        yield from _section("On the host", len(method.host))
        yield from _list_nodes(list(_group(method.host)))
    if method.rewritings:
        yield from _section(f"Rewritten: {rewritten(method)}", len(method.rewritings))
        yield from _list_groups(group_rewritings(method.rewritings))
    if method.refused_rewrites:
        yield from _section("Not rewritten", len(method.refused_rewrites))
        yield from _list_groups(group_refused(method.refused_rewrites))
    if method.adjustments:
        yield from _section("Dropped or cut", len(method.adjustments))
        adjustments = method.adjustments
        yield from _list_nodes([(a.kind, f"{shown.span(a.nodes)}: {a.reason} [{a.by}]") for a in adjustments])
    if method.refused_merges:
        yield from _section("Cannot be one partition", len(method.refused_merges))
        merges = method.refused_merges
        yield from _list_nodes(
            [("-", f"{m.first} and {m.second} ({backends.get(m.first, '')}): {shown.path(m.path)}") for m in merges]
        )
    if method.advice:
        yield from _section("Advice", len(method.advice))
        yield from _list_nodes([("-", str(advice)) for advice in method.advice])


def _prediction(method: MethodPlan) -> Iterator[RenderableType]:
    predicted = method.prediction
    parts = (("host", predicted.host_seconds), ("delegates", predicted.delegate_seconds))
    shares = [f"{name} {shown.duration(seconds)}" for name, seconds in parts]
    shares.append(f"data between them {shown.duration(predicted.crossing_seconds)}")
    if predicted.guessed:
        shares.append(f"{shown.many(predicted.guessed, 'operator')} without a cost, taken from the default model")
    yield Padding(Text(f"Predicted latency {shown.duration(predicted.seconds)}: {', '.join(shares)}"), (0, 0, 0, 2))
    if predicted.largest:
        yield from _section("Largest costs on the host", len(predicted.largest))
        yield from _list_nodes([(shown.duration(cost.seconds), _cost(cost)) for cost in predicted.largest])


def _cost(cost: HostCost) -> str:
    return f"{cost.count:,} x {cost.operator}: {cost.would_remove or 'no reason given'}"


def rewritten(method: MethodPlan) -> str:
    """Return what rewrites changed in all."""
    fewer = sum(len(one.removed) - len(one.made) for one in method.rewritings)
    saved = sum(one.bytes_saved for one in method.rewritings)
    words = [f"{fewer:,} operators fewer", f"{shown.size(abs(saved))} {'less' if saved >= 0 else 'more'} written"]
    if method.unchanged is not None:
        before, now = method.unchanged, method.prediction.seconds
        words.append(f"partitions {before.partitions:,} -> {len(method.partitions):,}")
        words.append(f"predicted {shown.duration(before.seconds)} -> {shown.duration(now)}")
    return ", ".join(words)


Group = tuple[str, str, str]
"""How often something was found, what it is, and one place where it is."""


def _list_groups(groups: Iterator[Group]) -> Iterator[RenderableType]:
    return _list_nodes([(times, f"{what}\n{place}") for times, what, place in groups])


def group_rewritings(rewritings: Sequence[Rewriting]) -> Iterator[Group]:
    """Yield rewritings grouped by what they replaced, the most frequent first, each group with one source line."""
    groups: dict[tuple[str, str], list[Rewriting]] = {}
    for one in rewritings:
        groups.setdefault((one.rewrite, shown.format_count(Counter(one.operators))), []).append(one)
    for (name, operators), ones in sorted(groups.items(), key=lambda group: -len(group[1])):
        example = next((one for one in ones if one.source), ones[0])
        source = shown.middle(example.source, _SOURCE)
        place = f"{example.removed[0]} -> {example.kept}" + (f": {source}" if source else "")
        yield f"{len(ones):,} x", f"{name}: {operators}", place


def group_refused(refused: Sequence[RefusedRewrite]) -> Iterator[Group]:
    """Yield refusals grouped by their reason, the most frequent first, each group with one source line."""
    groups: dict[tuple[str, str, str, str], list[RefusedRewrite]] = {}
    for one in refused:
        groups.setdefault((one.rewrite, one.operator, one.reason, one.advice), []).append(one)
    for (name, operator, reason, advice), ones in sorted(groups.items(), key=lambda group: -len(group[1])):
        example = next((one for one in ones if one.source), ones[0])
        source = shown.middle(example.source, _SOURCE)
        place = f"{example.node}" + (f": {source}" if source else "")
        yield f"{len(ones):,} x", f"{name}, {operator}: {reason}{'; ' if advice else ''}{advice}", place


def _section(title: str, count: int) -> Iterator[RenderableType]:
    yield Text(f"\n  {title} ({count:,})")


def _partitions(partitions: Sequence[PlannedPartition]) -> Table:
    rows = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in ("id", "backend", "operators", "weights", "in", "out", "flops"):
        left = column in ("id", "backend", "operators")
        rows.add_column(column, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    for partition in partitions:
        rows.add_row(
            Text(partition.id),
            Text(partition.backend_id),
            Text(_operators(partition)),
            shown.size(partition.weight_bytes),
            shown.size(partition.bytes_in),
            shown.size(partition.bytes_out),
            shown.operations(partition.flops),
        )
    return rows


def _operators(partition: PlannedPartition) -> str:
    counts = Counter({name.removesuffix(".default"): count for name, count in partition.operators.items()})
    return f"{len(partition.nodes):,}: {shown.format_count(counts)}"


def _in_words(partition: PlannedPartition) -> str:
    handed = f"{shown.size(partition.bytes_in)} in, {shown.size(partition.bytes_out)} out"
    costs = f"{shown.size(partition.weight_bytes)} of weights, {handed}, {shown.operations(partition.flops)} flops"
    return f"{partition.backend_id}, {_operators(partition)}; {costs}"


def _group(host: Sequence[HostNode]) -> Iterator[tuple[str, str]]:
    """Yield host operators grouped by reason, the most frequent first, each group with one source line."""
    groups: dict[tuple[str, str, str], list[HostNode]] = {}
    for node in host:
        groups.setdefault((node.operator, node.reason, node.by), []).append(node)
    for (operator, reason, by), nodes in sorted(groups.items(), key=lambda group: -len(group[1])):
        example = next((node for node in nodes if node.source), nodes[0])
        source = shown.middle(example.source, _SOURCE)
        where = f"\n{example.node}: {source}" if source else f"\n{example.node}"
        yield f"{len(nodes):,} x", f"{operator}: {reason or 'no reason given'} [{by}]{where}"


def _list_nodes(rows: Sequence[tuple[str, str]]) -> Iterator[RenderableType]:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(justify="right")
    grid.add_column(overflow="fold")
    for head, text in rows[:MOST]:
        grid.add_row(Text(head), Text(text))
    yield _indent(grid)
    yield from _rest(len(rows))


def _rest(count: int) -> Iterator[RenderableType]:
    if count > MOST:
        yield Text(f"    ... and {count - MOST:,} more")


def _indent(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 4))
