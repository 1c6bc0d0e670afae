"""XNNPACK's payloads, checked before the runtime gets them.

XNNPACK trusts the graph that it gets: it reads weights up to the end that their shape implies, divides by strides, and
writes results of the shape that it computes, wherever they end. It is the one backend that every ExecuTorch wheel has,
so its payloads are checked: their tables, not the weights.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
