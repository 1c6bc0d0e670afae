"""The set "safe": every rewrite of this package, in the order in which they are tried at a node."""

from exir_lowering.rewrites.attention import GroupedAttention, SafeSoftmax
from exir_lowering.rewrites.constants import Constants
from exir_lowering.rewrites.host_linear import HostLinear
from exir_lowering.rewrites.reductions import LayerNorm, Pooling, Reductions
from exir_lowering.rewrites.redundant import CommonSubexpressions, Identity
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
    HostLinear,
)
"""Every rewrite of this package, in order: what `LoweringOptions(rewrites="safe")` stands for."""
