"""Shape buckets. making: programs of fixed sizes from a dynamic one; choosing: which sizes, by what is measured."""

from exir_lowering.public_names import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
