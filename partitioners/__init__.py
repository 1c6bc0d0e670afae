"""Partitioners, and what to make partitioners of."""

from exir_lowering.partitioners.by_cost import CostPartitioner
from exir_lowering.partitioners.by_pattern import (
    ANY,
    Constant,
    Match,
    Pattern,
    PatternPartitioner,
    PatternSupport,
    one_of,
)
from exir_lowering.partitioners.by_support import SupportPartitioner
from exir_lowering.partitioners.chained import ChainedPartitioner
from exir_lowering.partitioners.convex import Proposal, contract, propose_partitions
from exir_lowering.partitioners.costs import CostModel, CostTable, RooflineModel
from exir_lowering.partitioners.drop_in import ConvexPartitioner, convex_proposals
from exir_lowering.partitioners.limits import Limits
from exir_lowering.partitioners.measure import measure_costs
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
    "ConvexPartitioner",
    "Constant",
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
