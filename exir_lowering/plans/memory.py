"""The memory that methods take, in words, and the check that it is not more than is required."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from exir_lowering.errors import MemoryRequirementError
from exir_lowering.plans import formatting as shown
from exir_lowering.plans.planned import MethodPlan, PlannedMemory

_LISTED = 8
"""How many tensors a message lists for each method."""

_NOT_COUNTED = "What backends allocate themselves, such as XNNPACK's workspace, is not counted."


def require_memory(planned: Mapping[str, PlannedMemory], most: int | None) -> None:
    """Check that no method takes more memory; a MemoryRequirementError lists what makes the peak."""
    over = {name: memory for name, memory in planned.items() if most is not None and memory.bytes > most}
    if not over:
        return
    lines = []
    for name, memory in over.items():
        lines.append(
            f"Method {name!r}: ExecuTorch's runtime allocates {memory.bytes:,} B for its tensors, required: at most "
            f"{most:,} B. {describe_peak(memory)}:"
        )
        lines += [f"    {line}" for line in list_tensors(memory, _LISTED)]
    lines.append(
        f"{_NOT_COUNTED} What to do: change these lines of the model, delegate the operators around them together, "
        'try LoweringOptions(memory_planner="smallest") if that is not chosen, or relax require_memory.'
    )
    raise MemoryRequirementError("\n".join(lines), memory=planned)


def describe(memory: PlannedMemory) -> str:
    """Return how much a method takes, with what was saved, in short."""
    saved = memory.greedy_bytes - memory.bytes
    before = f", {shown.size(memory.greedy_bytes)} with ExecuTorch's planner" if saved > 0 else ""
    return f"{shown.size(memory.bytes)} ({shown.size(memory.peak)} in use at the peak{before})"


def list_methods(methods: Iterable[MethodPlan]) -> Iterator[str]:
    """Yield how much each method takes, of those of which it is known."""
    for method in methods:
        if method.memory is not None:
            yield f"{method.name}: planned memory {describe(method.memory)}"


def describe_peak(memory: PlannedMemory) -> str:
    """Return how much is in use at most, by how many tensors."""
    return f"At the peak, {memory.peak:,} B are in use by {shown.many(memory.alive, 'tensor')}"


def list_tensors(memory: PlannedMemory, most: int) -> Iterator[str]:
    """Yield the largest tensors at the peak, each with the model's line, and the number of the others."""
    for tensor in memory.tensors[:most]:
        form = f", {tensor.dtype} {list(tensor.shape)}" if tensor.dtype else ""
        line = f" at {tensor.source}" if tensor.source else ""
        yield f"{tensor.bytes:,} B: {tensor.name} ({tensor.made_by}{form}){line}"
    if memory.alive > most:
        yield f"and {shown.many(memory.alive - most, 'smaller tensor')}"
