"""The findings of a plan: equal ones together, and what an app's developer can do apart from the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from exir_lowering.plans import formatting as shown
from exir_lowering.plans.planned import HostNode, MethodPlan, RefusedMerge

_T = TypeVar("_T")

_OF_THE_BACKEND = frozenset(("op", "nested", "pattern", "custom", "group", "unclaimed", "extract", "backend_failed"))
"""The codes of reasons that no change of a model or of options removes: the backend or its partitioner has to."""

_SLOW = frozenset(f"aten.{name}.default" for name in ("addmm", "baddbmm", "bmm", "convolution", "linear", "mm"))
"""Operators whose kernels on the host are slow."""

_FEW = 1_000_000
"""Up to so many floating-point operations of these nobody notices."""

_DEQUANTISING = "torchao.dequantize_affine.default"

_LOOPS = (
    "ExecuTorch's kernels for these take 75 to 240 times as long as PyTorch's in float32 (x86-64, one thread), and up "
    "to 6 times as long again in half precision. Let a backend take them: XNNPACK does in float32 and float16, in "
    "bfloat16 only with xnnpack(enable_bf16=True) and a runtime that has it"
)

_EACH_CALL = (
    "XNNPACK takes no weights of few bits where activations are in float: quantise these too, as torchao's "
    "Int8DynamicActivationIntxWeightConfig does"
)

_TENSORS = 5
"""How many tensors at the peak of memory are shown."""


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
    for_the_app: bool  # whether they are for the app's developer, or for who writes the backend
    findings: tuple[Finding, ...]


def find(method: MethodPlan) -> Iterator[Section]:
    """Yield what a plan says of a method, what helps most first."""
    own = {node.name: shown.place(node.source) for node in method.nodes}
    app, author = list(_slow(method)), list[Finding]()
    hosts = [list[Finding](), list[Finding]()]
    for group in _group(method.host, lambda host: (host.operator, host.reason, host.by)):
        first = group[0]
        why = f"{first.reason or 'no reason given'} [{first.by}]"
        found = Finding(f"{first.operator} on the host", why, _places(group), len(group))
        hosts[_by_the_app(first)].append(found)
    rewrites = [list[Finding](), list[Finding]()]
    for refused in _group(method.refused_rewrites, lambda one: (one.rewrite, one.operator, one.reason, one.advice)):
        one = refused[0]
        why = f"{one.reason}{'; ' if one.advice else ''}{one.advice}"
        what = f"{one.rewrite}, {one.operator} not rewritten"
        rewrites[bool(one.advice)].append(Finding(what, why, _places(refused), len(refused)))
    app += [*rewrites[True], *hosts[True]]
    author += [*hosts[False], *rewrites[False]]
    for change in method.adjustments:
        where = tuple((name, own.get(name, shown.Place("", ""))) for name in change.nodes)
        author.append(Finding(f"{change.kind} {shown.span(change.nodes)}", f"{change.reason} [{change.by}]", where))
    author += _merges(method)
    done, legal, peak = list[Finding](), list[Finding](), list[Finding]()
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
    for title, for_the_app, findings in (
        ("What you can do in the model and with options", True, app),
        (f"Rewritten: {rewritten(method)}" if done else "", True, done),
        ("Replaced on the host, where the runtime's own kernel does not run, or not right", True, legal),
        ("Largest tensors at the peak of memory", True, peak),
        ("For the author of a backend or partitioner", False, author),
    ):
        if findings:
            yield Section(title, for_the_app, tuple(findings))


def _slow(method: MethodPlan) -> Iterator[Finding]:
    """Yield what is slow on the host: products and convolutions, and weights that each call dequantises."""
    work = {node.name: node.flops for node in method.nodes}
    found = [host for host in method.host if host.operator in _SLOW]
    if (total := sum(work[host.node] for host in found)) > _FEW:
        names = ", ".join(sorted({shown.short_operator(host.operator) for host in found}))
        yield Finding(
            f"slow on the host: {len(found):,} x {names}, {shown.operations(total)} floating-point operations",
            _LOOPS,
            _places(found),
        )
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


def _by_the_app(host: HostNode) -> bool:
    return any(reason.code not in _OF_THE_BACKEND for reason in host.reasons)


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
