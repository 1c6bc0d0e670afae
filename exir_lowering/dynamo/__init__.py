"""torch.compile with this project's partitioners, backends and delegates."""

import lazy_loader

from exir_lowering.dynamo.registration import register

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

register()
