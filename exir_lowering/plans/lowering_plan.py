"""A plan of all methods, what options require of it, and the report of a lowering: a plan with sizes and times."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from rich.console import RenderableType
from rich.table import Table

from exir_lowering.errors import CoverageError, MemoryRequirementError
from exir_lowering.model import NarrowedDimension, RefusedPartition, State
from exir_lowering.options import LoweringOptions
from exir_lowering.plans import formatting as shown, views
from exir_lowering.plans.planned import HostNode, MethodPlan, PlannedMemory, Unchanged
from exir_lowering.pte.printing import Shown, in_notebook, make_table, render


@dataclass(frozen=True, slots=True, repr=False)
class LoweringPlan(Shown):
    """What `lower` does with some programs and partitioners.

    Attributes:
        methods: A plan for each method, in the order in which they were given.
        states: What the methods keep for later calls, and which of them share it.
        versions: The versions of exir-lowering, executorch and torch.
    """

    methods: tuple[MethodPlan, ...]
    states: tuple[State, ...] = field(default=(), kw_only=True)
    versions: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    @property
    def backend_ids(self) -> tuple[str, ...]:
        """The backends of the partitions, each once, in the order in which they first occur."""
        return tuple(dict.fromkeys(part.backend_id for method in self.methods for part in method.partitions))

    def beside(self, unchanged: LoweringPlan) -> LoweringPlan:
        """Return the plan, compared with the methods without rewrites.

        Args:
            unchanged: The plan of the same methods without rewrites.
        """
        pairs = zip(self.methods, unchanged.methods, strict=True)
        return replace(
            self,
            methods=tuple(
                replace(
                    method,
                    unchanged=Unchanged(
                        len(other.nodes), len(other.host), len(other.partitions), other.prediction.seconds
                    ),
                )
                for method, other in pairs
            ),
        )

    def to_text(self, *, width: int = 120, everything: bool = False) -> str:
        """Return at most 25 lines, on what helps most, what is on the host and why; or everything.

        Args:
            width: How many characters a line may have; only a word that is longer makes a longer line.
            everything: Whether every operator and partition is listed.
        """
        return views.to_text(self, width, everything=everything)

    def to_json(self) -> str:
        """Return everything as JSON."""
        return views.to_json(self)

    def to_dot(self) -> str:
        """Return the graph of partitions, and of what lies between them, for Graphviz."""
        return views.to_dot(self)

    def to_html(self) -> str:
        """Return an HTML page with the graph, the coverage and every host operator; it needs no network."""
        return views.to_html(self)

    def __repr__(self) -> str:
        return self.to_text()


_KINDS = 12
"""How many kinds of host operators an error lists for each method."""

_TENSORS = 8
"""How many tensors an error lists for each method."""


def require_coverage(plan: LoweringPlan, options: LoweringOptions) -> None:
    """Check that as much is delegated as the options require; a CoverageError lists what stays on the host."""
    required = 1.0 if options.require_full else options.require_coverage
    short = [method for method in plan.methods if method.coverage < required]
    if not short:
        return
    lines = []
    for method in short:
        lines.append(
            f"Method {method.name!r}: {method.delegated} of {len(method.nodes)} operators are delegated "
            f"({method.coverage:.1%}), required: {required:.1%}. On the host:"
        )
        groups: dict[tuple[str, str], list[HostNode]] = {}
        for node in method.host:
            groups.setdefault((node.operator, node.reason), []).append(node)
        for (operator, reason), nodes in list(groups.items())[:_KINDS]:
            source = next((f" at {node.source}" for node in nodes if node.source), "")
            lines.append(f"  {len(nodes)} x {operator}: {reason}{source}")
        if len(groups) > _KINDS:
            lines.append(f"  ... and {len(groups) - _KINDS} more kinds; the error's `plan` has all of them.")
        lines += [f"  {advice}" for advice in method.advice[:3]]
    option = "require_full" if options.require_full else "require_coverage"
    lines.append(f"Let a partitioner take them, or relax LoweringOptions({option}=...).")
    raise CoverageError("\n".join(lines), plan=plan)


def require_memory(planned: Mapping[str, PlannedMemory], most: int | None) -> None:
    """Check that no method takes more memory; a MemoryRequirementError lists what makes the peak."""
    lines = []
    for name, memory in planned.items():
        if most is None or memory.bytes <= most:
            continue
        lines.append(
            f"Method {name!r}: ExecuTorch's runtime allocates {memory.bytes:,} B for its tensors, required: at most "
            f"{most:,} B. At the peak, {memory.peak:,} B are in use by {shown.many(len(memory.tensors), 'tensor')}:"
        )
        for tensor in memory.tensors[:_TENSORS]:
            form = f", {tensor.dtype} {list(tensor.shape)}" if tensor.dtype else ""
            line = f" at {tensor.source}" if tensor.source else ""
            lines.append(f"    {tensor.bytes:,} B: {tensor.name} ({tensor.made_by}{form}){line}")
        if len(memory.tensors) > _TENSORS:
            lines.append(f"    and {shown.many(len(memory.tensors) - _TENSORS, 'smaller tensor')}")
    if lines:
        lines.append(
            "What backends allocate themselves, such as XNNPACK's workspace, is not counted. What to do: change these "
            "lines of the model, let a partitioner take the operators around them, try "
            'LoweringOptions(memory_planner="smallest"), or relax require_memory.'
        )
        raise MemoryRequirementError("\n".join(lines), memory=planned)


@dataclass
class Times:
    """The seconds spent in each step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the duration of the body to a step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What the cache had for a method's conversion, or for a partition.

    Attributes:
        kind: "edge" for a conversion to Edge dialect, "preprocess" for a partition.
        method: The method.
        partition: The id of the partition, "" for a conversion.
        hit: Whether the result was in the cache.
        differs: The parts of the key in which the nearest entry differs; () for a hit, or if there is no other entry.
        reason: Why there is no key for it, "" if there is one.
    """

    kind: Literal["edge", "preprocess"]
    method: str
    partition: str
    hit: bool
    differs: tuple[str, ...] = ()
    reason: str = ""

    def explain(self) -> str:
        """Return what happened, in words."""
        if self.hit:
            return "taken from the cache"
        if self.reason:
            return f"not cached: {self.reason}"
        if self.differs:
            return f"the nearest entry differs in: {', '.join(self.differs)}"
        return "the cache has no similar entry"

    def __str__(self) -> str:
        return f"{self.method} {self.partition or 'conversion'}: {self.explain()}"


@dataclass(frozen=True, slots=True, repr=False)
class Report(LoweringPlan):
    """What a lowering did: its plan, the sizes of the payloads, and the times.

    Attributes:
        payload_bytes: The size of each partition's payload in bytes.
        seconds: The time of each step: edge, rewrite, tag, extract, plan, preprocess, splice.
        left_to_executorch: By method, the steps of the Edge conversion that ExecuTorch's slower code did, each with the
            reason; methods without any are left out.
        cache: What was in the cache and what was not, and why; () without a cache.
        switched_off: The features that were off in this process, each with the reason: they rely on code of torch or
            ExecuTorch that is not known, so upstream's code was used.
        refused: The partitions that backends failed on, if `on_backend_error` is not "raise".
        units: By partition, the operators on each unit of the device, if the backend's compiler reports them.
        narrowed: The dynamic dimensions of inputs that may have fewer sizes in Edge dialect than in the programs.
    """

    payload_bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    left_to_executorch: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cache: tuple[CacheUse, ...] = ()
    switched_off: tuple[str, ...] = ()
    refused: tuple[RefusedPartition, ...] = ()
    units: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    narrowed: tuple[NarrowedDimension, ...] = ()

    def table(self) -> Table:
        """Return the delegation table."""
        # Fits a terminal with 60 columns.
        numbers = ("ops\nin them", "ops\non host", "share", "payload")
        rows = []
        for method in self.methods:
            backends = Counter(partition.backend_id for partition in method.partitions)
            delegates = ", ".join(f"{count} x {backend}" for backend, count in backends.items()) or "none"
            payload = sum(self.payload_bytes[partition.id] for partition in method.partitions)
            counts = (str(method.delegated), str(len(method.host)), f"{method.coverage:.1%}", f"{payload:,} B")
            rows.append((method.name, delegates, *counts))
        return make_table(("method", "delegates", *numbers), rows, numbers, "Delegation")

    def to_text(self, *, width: int = 120, everything: bool = False) -> str:
        """Return the plan's text, the delegation table and the times, as plain text.

        Args:
            width: The most columns of a line.
            everything: Whether every partition and every operator on the host is listed.

        Returns:
            The text.
        """
        own = render(self._parts(), width)
        most = max(views.LINES // 2, views.LINES - len(own.splitlines()))
        return views.to_text(self, width, everything=everything, most=most) + own

    def _parts(self) -> Iterator[RenderableType]:
        yield self.table()
        yield "  ".join(f"{step} {seconds:.2f} s" for step, seconds in self.seconds.items())
        for method, steps in self.left_to_executorch.items():
            yield from (f"{method}: ExecuTorch did {step}" for step in steps)
        yield from map(str, self.narrowed)
        for partition in self.refused:
            yield "\n  ".join((str(partition), *partition.sources))
        for partition_id, units in self.units.items():
            placed = ", ".join(f"{len(names)} on {unit}" for unit, names in units.items())
            yield f"{partition_id}: operators by unit: {placed or 'none'}"
        yield from (f"off: {feature}" for feature in self.switched_off)
        if self.cache:
            yield f"cache: {sum(use.hit for use in self.cache)} of {len(self.cache)} results taken from it"

    def _repr_html_(self) -> str:
        # Not the plan's page: that has neither payloads nor times.
        return in_notebook(self.to_text)
