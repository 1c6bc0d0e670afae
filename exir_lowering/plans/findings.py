"""The findings of a plan: equal ones together, and what most people ask for apart from the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from exir_lowering.plans import formatting as shown
from exir_lowering.plans.planned import MethodPlan, RefusedMerge

_T = TypeVar("_T")
Part = Literal["brief", "more", "author"]

_SLOW = frozenset(f"aten.{name}.default" for name in ("addmm", "baddbmm", "bmm", "convolution", "linear", "mm"))
"""Operators whose kernels on the host are slow."""

_FEW = 1_000_000  # up to so many floating-point operations of these nobody notices

_DEQUANTISING = "torchao.dequantize_affine.default"

_LOOPS = (
    "ExecuTorch's kernels for these take 75 to 240 times as long as PyTorch's in float32 (x86-64, one thread), and up "
    "to 6 times as long again in half precision"
)

_EACH_CALL = (
    "XNNPACK takes no weights of few bits where activations are in float: quantise these too, as torchao's "
    "Int8DynamicActivationIntxWeightConfig does"
)

_TENSORS = 5  # how many tensors at the peak of memory are shown


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that holds in one or several places."""

    what: str
    why: str
    where: tuple[tuple[str, shown.Place], ...] = ()  # names of nodes or of partitions, and the model's lines
    count: int = 1

    @property
    def head(self) -> str:
        """What it is, and how often, if that is more than once."""
        return self.what if self.count == 1 else f"{self.count:,} x {self.what}"

    def by_place(self) -> dict[shown.Place, list[str]]:
        """The names at each place; those without one are at the place ""."""
        found: dict[shown.Place, list[str]] = {}
        for name, place in self.where:
            found.setdefault(place, []).append(name)
        return found

    def lines(self) -> list[shown.Place]:
        """The lines of the model, each once."""
        return [place for place in self.by_place() if place.short]


@dataclass(frozen=True, slots=True)
class Section:
    """Findings of a kind, the most useful first."""

    title: str
    part: Part  # what a summary shows; what else there is; what helps who writes the backend
    findings: tuple[Finding, ...]


def find(method: MethodPlan) -> Iterator[Section]:
    """Yield what a plan says of a method, what helps most first."""
    own = {node.name: shown.place(node.source) for node in method.nodes}
    advice = [Finding(what, gain) for what, _, gain in (one.rpartition(": ") for one in method.advice)]
    author, left, done, legal, peak = (list[Finding]() for _ in range(5))
    for refused in _group(method.refused_rewrites, lambda one: (one.rewrite, one.operator, one.reason, one.advice)):
        one = refused[0]
        why = f"{one.reason}{'; ' if one.advice else ''}{one.advice}"
        left.append(Finding(f"{one.rewrite}, {one.operator}", why, _places(refused), len(refused)))
    for change in method.adjustments:
        where = tuple((name, own.get(name, shown.Place("", ""))) for name in change.nodes)
        author.append(Finding(f"{change.kind} {shown.span(change.nodes)}", f"{change.reason} [{change.by}]", where))
    author += _merges(method)
    for made in _group(method.rewritings, lambda one: (one.rewrite, one.operators)):
        where = tuple((f"{', '.join(one.removed)} -> {one.kept}", shown.place(one.source)) for one in made)
        operators = ", ".join(map(shown.short_operator, made[0].operators))
        done.append(Finding(made[0].rewrite, operators, where, len(made)))
    for replaced in _group(method.legalized, lambda one: (one.operator, one.reason)):
        what = f"{replaced[0].operator} -> {shown.many(sum(len(one.made) for one in replaced), 'operator')}"
        legal.append(Finding(what, replaced[0].reason, _places(replaced), len(replaced)))
    for tensor in method.memory.tensors[:_TENSORS] if method.memory is not None else ():
        form = f"{tensor.dtype} {list(tensor.shape)}, " if tensor.dtype else ""
        what = f"{shown.size(tensor.bytes)} of {tensor.name}"
        peak.append(Finding(what, f"{form}{tensor.made_by}", (("", shown.place(tensor.source)),)))
    parts: tuple[tuple[str, Part, list[Finding]], ...] = (
        (_cost(method), "brief", [*_slow(method), *_hosts(method)]),
        ("What you can do; each was tried with the partitioners", "brief", advice),
        (f"Rewritten: {rewritten(method)}", "more", done),
        ("Not rewritten", "more", left),
        ("Replaced on the host, where the runtime's own kernel does not run, or not right", "more", legal),
        ("Largest tensors at the peak of memory", "more", peak),
        ("For the author of a backend or partitioner", "author", author),
    )
    yield from (Section(title, part, tuple(findings)) for title, part, findings in parts if findings)


def _cost(method: MethodPlan) -> str:
    """Return what the host does in each call."""
    written = sum(node.result_bytes for node in method.nodes if node.partition is None)
    handed = sum(one.bytes_in + one.bytes_out for one in method.partitions)
    share = f"{1 - method.flops_coverage:.1%} of the operations"
    costs = f"{shown.size(written)} written, {shown.size(handed)} handed to delegates and back"
    return f"On the host, in each call: {shown.many(len(method.host), 'operator')}, {share}, {costs}"


def _hosts(method: MethodPlan) -> Iterator[Finding]:
    """Yield the operators on the host: those of one reason together, those that compute and write most first."""
    nodes = {node.name: node for node in method.nodes}
    found = list[tuple[int, Finding]]()
    for group in _group(method.host, lambda one: (one.operator, _TYPES.sub("", one.reason), one.by)):
        first, work = group[0], [nodes[one.node] for one in group]
        flops, written = sum(one.flops for one in work), sum(one.result_bytes for one in work)
        by = "" if (first.by,) == method.partitioners else f" [{first.by}]"  # the title says it
        where = tuple((f"{one.node}{''.join(_TYPES.findall(one.reason))}", shown.place(one.source)) for one in group)
        computed = f"{shown.operations(flops)} operations, " if flops else ""
        what = f"{first.operator} ({computed}{shown.size(written)} written)"
        why = f"{_TYPES.sub('', first.reason) or 'no reason given'}{by}"
        found.append((flops + written, Finding(what, why, where, len(group))))
    yield from (finding for _, finding in sorted(found, key=lambda one: one[0], reverse=True))


_TYPES = re.compile(r" \([^()]* -> [^()]*\)(?=$|;)")
"""What partitioners put behind a reason: the types of the operands and the result."""


def _slow(method: MethodPlan) -> Iterator[Finding]:
    """Yield what is slow on the host: products and convolutions, and weights that each call dequantises."""
    work = {node.name: node.flops for node in method.nodes}
    found = [host for host in method.host if host.operator in _SLOW]
    if (total := sum(work[host.node] for host in found)) > _FEW:
        names = ", ".join(sorted({shown.short_operator(host.operator) for host in found}))
        what = f"slow on the host: {len(found):,} x {names}, {shown.operations(total)} floating-point operations"
        yield Finding(what, _LOOPS, _places(found))
    looked_up = {name for node in method.nodes if node.operator == "aten.embedding.default" for name in node.inputs}
    weights = {node.name for node in method.nodes if not node.inputs} - looked_up
    dequantising = [host for host in method.host if host.operator == _DEQUANTISING and host.node in weights]
    if dequantising:
        what = f"slow on the host: weights of {shown.many(len(dequantising), 'layer')}, dequantised in each call"
        yield Finding(what, _EACH_CALL, _places(dequantising))


def _places(found: Iterable[Any]) -> tuple[tuple[str, shown.Place], ...]:
    return tuple((one.node, shown.place(one.source)) for one in found)


def rewritten(method: MethodPlan) -> str:
    """Return what rewrites changed in all."""
    fewer = sum(len(one.removed) - len(one.made) for one in method.rewritings)
    saved = sum(one.bytes_saved for one in method.rewritings)
    count = shown.many(abs(fewer), "fewer operator" if fewer >= 0 else "more operator")
    return f"{count}, {shown.size(abs(saved))} {'less' if saved >= 0 else 'more'} written"


def _group(items: Iterable[_T], key: Callable[[_T], object]) -> Iterator[list[_T]]:
    """Yield equal items together, the most frequent first."""
    groups: dict[object, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    yield from sorted(groups.values(), key=len, reverse=True)


def _merges(method: MethodPlan) -> Iterator[Finding]:
    by_name = {node.name: node for node in method.nodes}
    titles = name_partitions(method)
    backends = {partition.id: partition.backend_id for partition in method.partitions}

    def between(each: RefusedMerge) -> str:
        found = [by_name[name] for name in each.path if name in by_name]
        return shown.path([shown.short_operator(node.operator) for node in found] or each.path)

    for group in _group(method.refused_merges, lambda each: (backends.get(each.first), between(each))):
        where = tuple(
            (
                f"{titles.get(each.first, each.first)} ({each.first}) and {titles.get(each.second, each.second)} "
                f"({each.second}): {' -> '.join(each.path)}",
                shown.Place("", ""),
            )
            for each in group
        )
        what = f"two partitions of {backends.get(group[0].first, 'a backend')} cannot be one"
        yield Finding(what, f"because of {between(group[0])}", where, len(group))


def name_partitions(method: MethodPlan) -> dict[str, str]:
    """Return the name of each partition by its id."""
    by_name = {node.name: node for node in method.nodes}
    return {one.id: shown.name_nodes([by_name[name] for name in one.nodes]) for one in method.partitions}
