"""A drop-in for `executorch.exir.backend.backend_api.to_backend`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
