"""Value ranges: what can be said, without running a program, about every value that it computes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
