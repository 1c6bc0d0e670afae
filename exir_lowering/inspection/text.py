"""A report as plain text, the summary first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from exir_lowering.errors import few
from exir_lowering.plans import formatting as shown
from exir_lowering.pte.printing import make_table, middle, printable, render

if TYPE_CHECKING:
    from exir_lowering.inspection.report import DelegateReport, FileReport, MethodReport

MOST = 30  # how many rows of a list are shown; the others are counted

_FEW = 3
_MADE_BY = ("exir-lowering", "torch", "executorch")


def summary(report: FileReport, width: int) -> str:
    """Return at most ten lines, none wider than the width."""
    return "\n".join(middle(printable(line), width) for line in _summary(report)) + "\n"


def _summary(report: FileReport) -> Iterator[str]:
    sealed = "with digests" if report.sealed else "without digests"
    yield f"{report.name}: {report.format} of {shown.size(report.size)}, {sealed}"
    if report.format == ".pte":
        known = report.provenance.versions if report.provenance is not None else {}
        versions = ", ".join(f"{name} {known[name]}" for name in _MADE_BY if name in known)
        yield f"made by: {versions or 'not recorded in the file'}"
    for method in report.methods[:_FEW]:
        yield f"method {method.signature!r}"
    if len(report.methods) > _FEW:
        yield f"and {shown.many(len(report.methods) - _FEW, 'more method')}"
    if report.methods:
        backends = Counter(each.backend for method in report.methods for each in method.delegates)
        kernels = sum((Counter(method.kernels) for method in report.methods), Counter[str]())
        yield f"delegates: {shown.format_count(backends) or 'none'}; kernels: {shown.format_count(kernels) or 'none'}"
        yield "memory: " + ", ".join(
            f"{shown.size(method.memory.bytes)} planned for {method.name}, {shown.size(method.device.peak)} in all"
            for method in report.methods[:_FEW]
        )
    if report.stored:
        yield _weights(report)
    # Below half of 0.1% a part would be shown as 0.0%.
    shares = ((kind, size / report.size) for kind, size in report.bytes_by_kind().items())
    yield "bytes: " + ", ".join(f"{share:.1%} {kind}" for kind, share in shares if share >= 0.0005)


def _weights(report: FileReport) -> str:
    weights = [one for one in report.stored if one.kind != "payload"]
    inside = [one for one in weights if one.start is not None]
    shared = sum(len(one.users) > 1 for one in weights)
    text = f"weights: {shown.many(len(weights), 'tensor')} of {shown.size(sum(one.bytes for one in weights))}"
    if len(inside) < len(weights):
        text += f", {len(weights) - len(inside):,} of them in data files"
    largest = f", the largest {middle(weights[0].title, 40)}" if weights else ""
    return f"{text}, {shared:,} used more than once{largest}"


def to_text(report: FileReport, width: int) -> str:
    """Return a report as plain text; see `FileReport.to_text`."""
    lines = render(_parts(report), width)
    return summary(report, width) + lines + "".join(f"\n{to_text(one, width)}" for one in report.data)


def section(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Padding]:
    """Yield a table under a title, nothing if it has no rows; columns that end in a space are of numbers."""
    if not rows:
        return
    names, numbers = [name.strip() for name in columns], [name.strip() for name in columns if name.endswith(" ")]
    cells = (map(printable, row) for row in rows[:MOST])
    table = make_table(names, cells, numbers, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    yield Padding(Text(printable(title)), (1, 0, 0, 2))
    yield Padding(table, (0, 0, 0, 4))
    if len(rows) > MOST:
        yield Padding(Text(f"and {len(rows) - MOST:,} more"), (0, 0, 0, 4))


def _parts(report: FileReport) -> Iterator[RenderableType]:
    methods, rows = {method.name: method for method in report.methods}, list[tuple[str, ...]]()
    for line in report.families:
        method = methods[line.method]
        sizes = (
            f"{method.signature.inputs[size.input].name}.{size.dimension} "
            f"{f'{size.least} to ' * (not size.exact)}{size.size}"
            for size in line.bucket.sizes
        )
        payloads, planned = sum(one.payload_bytes for one in method.delegates), method.memory.bytes
        backends = ", ".join(line.backends) or "none"
        rows.append((line.method, backends, ", ".join(sizes), f"{payloads:,}", f"{planned:,}"))
    columns = ("method", "backends", "sizes", "payloads ", "planned memory ")
    yield from section("families of methods, in order of preference", columns, rows)
    for method in report.methods:
        yield from _method(method)
    if report.methods or report.stored:
        yield Text("\nfile")
    stored = []
    for one in report.stored:
        where, more = "" if one.start is not None else " (in a data file)", ", ..." * (len(one.users) > 6)
        users = ", ".join(one.users[:6]) + more
        stored.append((f"{one.bytes:,}", f"{one.kind}{where}", middle(one.title, 60), users))
    yield from section("weights, payloads and named data", ("bytes ", "kind", "name", "used by"), stored)
    kinds = [(f"{size:,}", kind, f"{size / report.size:.1%}") for kind, size in report.bytes_by_kind().items()]
    yield from section(f"every byte: {report.size:,}", ("bytes ", "what", "share "), kinds)
    if (known := report.provenance) is not None:
        facts = [(name, str(value)) for name, value in (*known.options.items(), *known.backends.items())]
        for name, made in known.methods.items():
            facts.append((f"{name}: partitioners", ", ".join(made.partitioners) or "none"))
            facts += [(f"{name}: {rewrite}", shown.many(count, "time")) for rewrite, count in made.rewrites.items()]
        yield from section("how it was made", ("", ""), facts)


def _method(method: MethodReport) -> Iterator[RenderableType]:
    yield Text(f"\n{method.signature}")
    counts = sorted(method.kernels.items(), key=lambda item: (-item[1], item[0]))
    yield from section("kernels", ("calls ", "kernel"), [(f"{count:,}", name) for name, count in counts])
    rows = [row for delegate in method.delegates for row in _delegate(delegate)]
    yield from section("delegates", ("#", "backend", "payload ", "has"), rows)
    tensors = {tensor.value: tensor for tensor in method.memory.tensors}
    arenas = []
    for arena in method.memory.arenas:
        makers = few((f"{tensors[value].name} ({tensors[value].bytes:,})" for value in arena.tensors), _FEW)
        arenas.append((str(arena.number), f"{arena.bytes:,}", f"{arena.peak:,}", str(arena.at), makers))
    yield from section("planned memory", ("arena", "bytes ", "peak ", "at ", "of"), arenas)
    yield from section("on a device", ("bytes ", "for"), [row[1:] for row in method.device.rows()])


def _delegate(delegate: DelegateReport) -> Iterator[tuple[str, str, str, str]]:
    operators = Counter(operator.name for operator in delegate.operators)
    specs = []
    for key, value in delegate.compile_specs:
        plain = value.isascii() and value.decode().isprintable()
        specs.append(f"{key}={middle(value.decode() if plain else value.hex(), 40)}")
    words = [shown.format_count(operators, 6)] * bool(operators) + specs
    yield str(delegate.number), delegate.backend, f"{delegate.payload_bytes:,}", "; ".join(words)
    for operator in delegate.operators[:MOST]:
        yield "", "", "", f"{operator.name}: {', '.join(operator.inputs)} -> {', '.join(operator.outputs)}"
