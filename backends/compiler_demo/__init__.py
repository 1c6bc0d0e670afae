"""A compiler of a few operators, to read: it makes a text of instructions, and its delegate runs them.

Names are imported when they are used, so that the run-time side is imported without the compiler.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exir_lowering.backends.compiler_demo.backend import CompilerDemoBackend
    from exir_lowering.backends.compiler_demo.delegate import CompilerDemoDelegate

__all__ = ["CompilerDemoBackend", "CompilerDemoDelegate"]

_HOME = {"CompilerDemoBackend": "backend", "CompilerDemoDelegate": "delegate"}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value
