"""Load a `.pte` file and run its methods in ExecuTorch's own runtime."""

from exir_lowering.runtime.program import LoadedProgram, load

__all__ = ["LoadedProgram", "load"]
