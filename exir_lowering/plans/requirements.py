"""Check that as much is delegated as the caller requires, and that methods take no more memory."""

from __future__ import annotations

from collections.abc import Mapping

from exir_lowering.errors import CoverageError, MemoryRequirementError
from exir_lowering.options import LoweringOptions
from exir_lowering.plans import formatting as shown
from exir_lowering.plans.lowering_plan import LoweringPlan
from exir_lowering.plans.planned import HostNode, PlannedMemory

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
