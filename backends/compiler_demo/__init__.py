"""A compiler for a few operators, as an example: it writes instructions as text, and its delegate runs them.

Names are imported when they are first used, so that the run-time side does not import the compiler.
"""

from exir_lowering.public_names import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
