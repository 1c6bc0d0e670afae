"""Programs in int8, by the flow that ExecuTorch and torchao have for it, and how far each layer is from float."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
