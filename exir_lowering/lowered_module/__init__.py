"""A lowered model as an `nn.Module`: called as the original, executed by its delegates, saved with its attributes."""

from exir_lowering.lowered_module.module import Delegates, LoweredMethod, LoweredModule

__all__ = ["Delegates", "LoweredMethod", "LoweredModule"]
