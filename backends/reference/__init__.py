"""The yardstick: any core ATen program in a compact format, executed with torch.

The run-time side, `ReferenceDelegate`, is imported without the compiler: names are imported when they are used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
