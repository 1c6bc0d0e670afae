"""A drop-in for `executorch.exir.backend.backend_api.to_backend`."""

from exir_lowering.public_names import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
