"""Lower a map of torch.export programs to one ExecuTorch `.pte` file."""

from exir_lowering.public_names import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
