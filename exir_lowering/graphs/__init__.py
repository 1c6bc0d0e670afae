"""The kit for graphs: what the compiler, partitioners and backends share to walk, copy, order and measure them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
