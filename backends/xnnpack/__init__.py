"""XNNPACK, which is part of ExecuTorch's runtime in every wheel: its partitioner, and what keeps its numbers right."""

from exir_lowering.public_names import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
