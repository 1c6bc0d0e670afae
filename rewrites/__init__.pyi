from .common_subexpressions import CommonSubexpressions as CommonSubexpressions
from .identity import Identity as Identity
from .safe import SAFE as SAFE
from .safe_softmax import SafeSoftmax as SafeSoftmax
