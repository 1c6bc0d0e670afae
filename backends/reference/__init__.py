"""The reference for other backends: any core ATen program in a compact format, executed with torch.

Names are imported when they are first used, so that `ReferenceDelegate`, the run-time side, imports no compiler.
"""

from exir_lowering.public_names import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
