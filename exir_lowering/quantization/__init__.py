"""Programs in 8 or 4 bits, by flows of ExecuTorch and torchao, and how far each layer is from float."""

from exir_lowering.public_names import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
