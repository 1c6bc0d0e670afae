"""The memory that methods take, in words, and the check that it is not more than is required."""

from __future__ import annotations

from collections.abc import Sequence

from exir_lowering.errors import MemoryRequirementError
from exir_lowering.plans import formatting as shown
from exir_lowering.plans.planned import MethodPlan, PlannedMemory

_LISTED = 8
"""How many tensors a message lists for each method."""


def require_memory(methods: Sequence[MethodPlan], most: int | None) -> None:
    """Check that no method takes more memory; a MemoryRequirementError lists what makes the peak."""
    lines = []
    planned = {method.name: method.memory for method in methods}
    for name, memory in planned.items():
        if memory is None or most is None or memory.bytes <= most:
            continue
        lines.append(
            f"Method {name!r}: ExecuTorch's runtime allocates {memory.bytes:,} B for its tensors, required: at most "
            f"{most:,} B. At the peak, {memory.peak:,} B are in use by {shown.many(len(memory.tensors), 'tensor')}:"
        )
        for tensor in memory.tensors[:_LISTED]:
            form = f", {tensor.dtype} {list(tensor.shape)}" if tensor.dtype else ""
            line = f" at {tensor.source}" if tensor.source else ""
            lines.append(f"    {tensor.bytes:,} B: {tensor.name} ({tensor.made_by}{form}){line}")
        if len(memory.tensors) > _LISTED:
            lines.append(f"    and {shown.many(len(memory.tensors) - _LISTED, 'smaller tensor')}")
    if lines:
        lines.append(
            "What backends allocate themselves, such as XNNPACK's workspace, is not counted. What to do: change these "
            "lines of the model, let a partitioner take the operators around them, try "
            'LoweringOptions(memory_planner="smallest"), or relax require_memory.'
        )
        raise MemoryRequirementError("\n".join(lines), memory=planned)


def describe(memory: PlannedMemory | None) -> str:
    """Return how much a method takes, with what was saved, in short."""
    if memory is None:
        return "not known"
    saved = memory.greedy_bytes - memory.bytes
    before = f", {shown.size(memory.greedy_bytes)} with ExecuTorch's planner" if saved > 0 else ""
    return f"{shown.size(memory.bytes)} ({shown.size(memory.peak)} in use at the peak{before})"
