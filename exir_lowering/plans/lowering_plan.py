"""A plan of all methods, and what options require of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from exir_lowering.errors import CoverageError, MemoryRequirementError
from exir_lowering.model import State
from exir_lowering.options import LoweringOptions
from exir_lowering.plans import formatting as shown, views
from exir_lowering.plans.planned import HostNode, MethodPlan, PlannedMemory
from exir_lowering.pte.printing import Shown


@dataclass(frozen=True, slots=True, repr=False)
class LoweringPlan(Shown):
    """What `lower` does with some programs and partitioners.

    Attributes:
        methods: A plan for each method, in the order in which they were given.
        states: What the methods keep for later calls, and which of them share it.
        versions: The versions of exir-lowering, executorch and torch.
        warnings: What was most likely a mistake when the programs were exported.
    """

    methods: tuple[MethodPlan, ...]
    states: tuple[State, ...] = field(default=(), kw_only=True)
    versions: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    warnings: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def backend_ids(self) -> tuple[str, ...]:
        """The backends of the partitions, each once, in the order in which they first occur."""
        return tuple(dict.fromkeys(part.backend_id for method in self.methods for part in method.partitions))

    def to_text(self, *, width: int = 120, everything: bool = False) -> str:
        """Return at most 25 lines: coverage, what is on the host and what it costs, what to do; or everything.

        Args:
            width: How many characters a line may have; only a word that is longer makes a longer line.
            everything: Whether every operator, partition and rewrite is listed, and what helps authors of backends.
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
        from exir_lowering.plans.page import to_html  # jinja2 is imported where it is used

        return to_html(self)

    def __repr__(self) -> str:
        return self.to_text()


_KINDS, _TENSORS = 12, 8  # how many kinds of host operators, and tensors, an error lists for each method


def require_coverage(plan: LoweringPlan, options: LoweringOptions) -> None:
    """Check that as much is delegated as the options require; a CoverageError lists what stays on the host."""
    required = options.require_coverage
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
    lines.append("Let a partitioner take them, or relax LoweringOptions(require_coverage=...).")
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
            "lines of the model, let a partitioner take the operators around them, or relax require_memory."
        )
        raise MemoryRequirementError("\n".join(lines), memory=planned)
