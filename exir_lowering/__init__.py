"""Lower a map of torch.export programs to one ExecuTorch `.pte` file."""

import sys

import lazy_loader

from exir_lowering.compat.moved import MovedModules

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

sys.meta_path.append(MovedModules())
