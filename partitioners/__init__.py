"""Partitioners, and the parts to build partitioners from."""

from exir_lowering.public_names import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
