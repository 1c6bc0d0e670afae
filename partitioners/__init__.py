"""Partitioners, and what to make partitioners of."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exir_lowering.partitioners.by_cost import CostPartitioner
    from exir_lowering.partitioners.by_pattern import PatternPartitioner
    from exir_lowering.partitioners.by_support import SupportPartitioner
    from exir_lowering.partitioners.chained import ChainedPartitioner
    from exir_lowering.partitioners.convex import Proposal, contract, propose_partitions
    from exir_lowering.partitioners.costs import CostModel, CostTable, RooflineModel
    from exir_lowering.partitioners.drop_in import ConvexPartitioner, convex_proposals
    from exir_lowering.partitioners.limits import Limits
    from exir_lowering.partitioners.measure import measure_costs
    from exir_lowering.partitioners.patterns import ANY, Constant, Match, Pattern, PatternSupport, one_of
    from exir_lowering.partitioners.rules import Rule, RuledPartitioner, allow, deny, pin
    from exir_lowering.partitioners.support import (
        No,
        Scope,
        Support,
        argument_values,
        constant_arguments,
        constant_weights,
        dtypes,
        everything,
        memory_format,
        ops,
        ranks,
        scopes,
        static_shapes,
        where,
    )

__all__ = [
    "ANY",
    "ChainedPartitioner",
    "Constant",
    "ConvexPartitioner",
    "CostModel",
    "CostPartitioner",
    "CostTable",
    "Limits",
    "Match",
    "No",
    "Pattern",
    "PatternPartitioner",
    "PatternSupport",
    "Proposal",
    "RooflineModel",
    "Rule",
    "RuledPartitioner",
    "Scope",
    "Support",
    "SupportPartitioner",
    "allow",
    "argument_values",
    "constant_arguments",
    "constant_weights",
    "contract",
    "convex_proposals",
    "deny",
    "dtypes",
    "everything",
    "measure_costs",
    "memory_format",
    "one_of",
    "ops",
    "pin",
    "propose_partitions",
    "ranks",
    "scopes",
    "static_shapes",
    "where",
]

_HOMES = {
    "by_cost": ("CostPartitioner",),
    "by_pattern": ("PatternPartitioner",),
    "by_support": ("SupportPartitioner",),
    "chained": ("ChainedPartitioner",),
    "convex": (
        "Proposal",
        "contract",
        "propose_partitions",
    ),
    "costs": (
        "CostModel",
        "CostTable",
        "RooflineModel",
    ),
    "drop_in": (
        "ConvexPartitioner",
        "convex_proposals",
    ),
    "limits": ("Limits",),
    "measure": ("measure_costs",),
    "patterns": ("ANY", "Constant", "Match", "Pattern", "PatternSupport", "one_of"),
    "rules": (
        "Rule",
        "RuledPartitioner",
        "allow",
        "deny",
        "pin",
    ),
    "support": (
        "No",
        "Scope",
        "Support",
        "argument_values",
        "constant_arguments",
        "constant_weights",
        "dtypes",
        "everything",
        "memory_format",
        "ops",
        "ranks",
        "scopes",
        "static_shapes",
        "where",
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: the engine takes single algorithms from this folder."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    """List the public names too, those that are not imported yet included."""
    return sorted({*globals(), *__all__})
