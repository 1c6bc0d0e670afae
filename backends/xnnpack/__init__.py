"""XNNPACK, which is part of ExecuTorch's runtime in every wheel: its partitioner, and its payloads."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
