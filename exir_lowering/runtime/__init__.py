"""Load a `.pte` file and run its methods, in ExecuTorch's own runtime."""

from exir_lowering.runtime.choosing import Choice
from exir_lowering.runtime.isolated.engine import Limits
from exir_lowering.runtime.program import LoadedProgram, load

__all__ = ["Choice", "Limits", "LoadedProgram", "load"]
