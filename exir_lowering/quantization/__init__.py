"""Programs in int8, by the flow that ExecuTorch and torchao have for it, and how far each layer is from float."""

from exir_lowering.public_names import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
