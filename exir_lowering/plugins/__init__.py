"""The contracts of partitioners, backends and delegates, and how plug-ins are found and called."""

from exir_lowering.public_names import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
