"""The set "safe": every rewrite of this package, in the order in which they are tried at a node."""

from exir_lowering.rewrites.common_subexpressions import CommonSubexpressions
from exir_lowering.rewrites.constants import Constants
from exir_lowering.rewrites.grouped_attention import GroupedAttention
from exir_lowering.rewrites.identity import Identity
from exir_lowering.rewrites.layer_norm import LayerNorm
from exir_lowering.rewrites.pooling import Pooling
from exir_lowering.rewrites.reductions import Reductions
from exir_lowering.rewrites.safe_softmax import SafeSoftmax
from exir_lowering.rewrites.scalar_operands import ScalarOperands
from exir_lowering.rewrites.wide_depthwise import WideDepthwise

SAFE = (
    Identity,
    Constants,
    SafeSoftmax,
    Pooling,
    GroupedAttention,
    ScalarOperands,
    Reductions,
    LayerNorm,
    WideDepthwise,
    CommonSubexpressions,
)
"""Every rewrite of this package, in order: what `LoweringOptions(rewrites="safe")` stands for."""
