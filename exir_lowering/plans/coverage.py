"""Check that as much is delegated as the caller requires."""

from __future__ import annotations

from exir_lowering.errors import CoverageError
from exir_lowering.options import LoweringOptions
from exir_lowering.plans.lowering_plan import LoweringPlan
from exir_lowering.plans.planned import HostNode

_LISTED = 12
"""How many kinds of host operators an error lists for each method."""


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
        for (operator, reason), nodes in list(groups.items())[:_LISTED]:
            source = next((f" at {node.source}" for node in nodes if node.source), "")
            lines.append(f"  {len(nodes)} x {operator}: {reason}{source}")
        if len(groups) > _LISTED:
            lines.append(f"  ... and {len(groups) - _LISTED} more kinds; the error's `plan` has all of them.")
        lines += [f"  {advice}" for advice in method.advice[:3]]
    option = "require_full" if options.require_full else "require_coverage"
    lines.append(f"Let a partitioner take them, or relax LoweringOptions({option}=...).")
    raise CoverageError("\n".join(lines), plan=plan)
