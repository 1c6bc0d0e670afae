"""A compiler of a few operators, to read: it makes a text of instructions, and its delegate runs them.

Names are imported when they are used, so that the run-time side is imported without the compiler.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
