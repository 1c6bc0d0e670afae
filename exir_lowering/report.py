"""What was delegated, what was not and why, and where the time went."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from executorch.exir.backend.partitioner import Partitioner
from rich import box
from rich.console import Console
from rich.table import Table
from torch.export import ExportedProgram
from torch.fx import GraphModule

from exir_lowering import graphs
from exir_lowering.model import ExtractedMethod, LoweredPartition, Rejection, TaggedMethod


@dataclass
class Times:
    """Seconds spent in each step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the time that the body takes to a step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class DelegateReport:
    """One delegate: its partition, backend, operators (name to count), and the bytes of its payload."""

    partition: str
    backend_id: str
    operators: Mapping[str, int]
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class HostNode:
    """A call_function node that stays on the host, with the reason and where the model has it."""

    node: str
    operator: str
    reason: str
    by: str
    module: str
    source: str


@dataclass(frozen=True, slots=True)
class MethodReport:
    """One method: its delegates and its host nodes."""

    name: str
    delegates: tuple[DelegateReport, ...]
    host: tuple[HostNode, ...]

    @property
    def delegated(self) -> int:
        """How many operators run in delegates."""
        return sum(sum(delegate.operators.values()) for delegate in self.delegates)

    @property
    def coverage(self) -> float:
        """The delegated share of the operators, 0 to 1; 1 for a method without operators."""
        total = self.delegated + len(self.host)
        return self.delegated / total if total else 1.0


@dataclass(frozen=True, slots=True)
class Report:
    """What a lowering did.

    Attributes:
        methods: A report for each method.
        seconds: Time by step: edge, tag, extract, preprocess, splice.
    """

    methods: tuple[MethodReport, ...]
    seconds: Mapping[str, float]

    def table(self) -> Table:
        """Return the delegation table."""
        # Narrow enough for a terminal of 60 columns.
        table = Table(title="Delegation", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for column in ("method", "delegates", "ops\nin them", "ops\non host", "share", "payload"):
            left = column in ("method", "delegates")
            table.add_column(column, justify="left" if left else "right", overflow="fold")
        for method in self.methods:
            payload = sum(delegate.payload_bytes for delegate in method.delegates)
            backends = Counter(delegate.backend_id for delegate in method.delegates)
            table.add_row(
                method.name,
                ", ".join(f"{count} x {backend}" for backend, count in backends.items()) or "none",
                str(method.delegated),
                str(len(method.host)),
                f"{method.coverage:.1%}",
                f"{payload:,} B",
            )
        return table

    def to_text(self) -> str:
        """Return the table, the host operators with their reasons, and the times, as plain text."""
        console = Console(width=120, no_color=True, highlight=False)
        with console.capture() as capture:
            console.print(self.table())
            for method in self.methods:
                reasons = Counter((node.operator, node.reason, node.by) for node in method.host)
                for (operator, reason, by), count in reasons.items():
                    console.print(f"{method.name}: {count} x {operator} on the host: {reason} [{by}]", markup=False)
            console.print("  ".join(f"{step} {seconds:.2f} s" for step, seconds in self.seconds.items()))
        return capture.get()

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        return self.to_text()


def report(
    methods: Mapping[str, ExportedProgram],
    tagged: Sequence[TaggedMethod],
    extracted: Sequence[ExtractedMethod],
    lowered: Mapping[str, LoweredPartition],
    partitioners: Mapping[str, Sequence[Partitioner]],
    times: Times,
) -> Report:
    """Describe a lowering."""
    said: dict[tuple[str, str], Rejection] = {}
    for rejections in (*(method.rejections for method in tagged), *(method.rejections for method in extracted)):
        said.update({(r.method, r.node): r for r in rejections})
    return Report(
        tuple(
            MethodReport(
                method.name,
                tuple(_delegate(lowered[partition.id]) for partition in method.partitions),
                tuple(_host(method, said, partitioners[method.name])),
            )
            for method in extracted
        ),
        dict(times.seconds),
    )


def _delegate(lowered: LoweredPartition) -> DelegateReport:
    partition = lowered.partition
    operators = Counter(name for name, _, _ in _operators(partition.program.graph_module))
    return DelegateReport(partition.id, partition.backend_id, dict(operators), len(lowered.result.processed_bytes))


def _operators(graph_module: GraphModule) -> Iterator[tuple[str, Any, str]]:
    for path, module in graphs.walk(graph_module):
        for node in module.graph.nodes:
            if node.op == "call_function" and not graphs.is_getitem(node) and not graphs.is_delegate_call(node):
                yield graphs.operator_name(node), node, ".".join((*path, node.name))


def _host(
    method: ExtractedMethod, said: Mapping[tuple[str, str], Rejection], partitioners: Sequence[Partitioner]
) -> Iterator[HostNode]:
    names = ", ".join(type(partitioner).__name__ for partitioner in partitioners)
    for operator, node, name in _operators(method.program.graph_module):
        rejection = said.get((method.name, name))
        if rejection is not None:
            reason, by = rejection.reason, rejection.by
        elif names:
            reason, by = "not claimed", names
        else:
            reason, by = "the method has no partitioner", "lower"
        yield HostNode(name, operator, reason, by, graphs.module_stack(node), graphs.source_line(node))
