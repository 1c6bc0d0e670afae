from .attention import GroupedAttention as GroupedAttention, RowFactors as RowFactors, SafeSoftmax as SafeSoftmax
from .constants import Constants as Constants
from .movements import Broadcasts as Broadcasts, Pieces as Pieces
from .products import Products as Products
from .reductions import LayerNorm as LayerNorm, Pooling as Pooling, Reductions as Reductions
from .redundant import CommonSubexpressions as CommonSubexpressions, Identity as Identity
from .safe import SAFE as SAFE
from .scalar_operands import Powers as Powers, ScalarOperands as ScalarOperands
from .wide_depthwise import WideDepthwise as WideDepthwise
