"""The set "safe": the rewrites of this package, in order."""

from exir_lowering.rewrites.attention import GroupedAttention, RowFactors, SafeSoftmax
from exir_lowering.rewrites.constants import Constants
from exir_lowering.rewrites.movements import Broadcasts, Pieces
from exir_lowering.rewrites.products import Products
from exir_lowering.rewrites.reductions import LayerNorm, Pooling, Reductions
from exir_lowering.rewrites.redundant import CommonSubexpressions, Identity
from exir_lowering.rewrites.scalar_operands import Powers, ScalarOperands
from exir_lowering.rewrites.wide_depthwise import WideDepthwise

SAFE = (
    Identity,
    Constants,
    SafeSoftmax,
    RowFactors,
    Broadcasts,
    Pieces,
    Products,
    Pooling,
    GroupedAttention,
    ScalarOperands,
    Powers,
    Reductions,
    LayerNorm,
    WideDepthwise,
    CommonSubexpressions,
)
"""What `LoweringOptions(rewrites="safe")` stands for: the rewrites of this package, in order."""
