"""The set "safe": every rewrite of this package, in the order in which they are tried at a node."""

from exir_lowering.rewrites.common_subexpressions import CommonSubexpressions
from exir_lowering.rewrites.identity import Identity
from exir_lowering.rewrites.safe_softmax import SafeSoftmax

SAFE = (Identity, SafeSoftmax, CommonSubexpressions)
