"""The yardstick: any core ATen program in a compact format, executed with torch.

The run-time side, `ReferenceDelegate`, is imported without the compiler: names are imported when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exir_lowering.backends.reference.backend import ReferenceBackend
    from exir_lowering.backends.reference.delegate import ReferenceDelegate
    from exir_lowering.backends.reference.support import executable, reference_partitioner

__all__ = ["ReferenceBackend", "ReferenceDelegate", "executable", "reference_partitioner"]

_HOME = {
    "ReferenceBackend": "backend",
    "ReferenceDelegate": "delegate",
    "executable": "support",
    "reference_partitioner": "support",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value
