from .common_subexpressions import CommonSubexpressions as CommonSubexpressions
from .grouped_attention import GroupedAttention as GroupedAttention
from .identity import Identity as Identity
from .pooling import Pooling as Pooling
from .reductions import Reductions as Reductions
from .safe import SAFE as SAFE
from .safe_softmax import SafeSoftmax as SafeSoftmax
from .scalar_operands import ScalarOperands as ScalarOperands
