"""What ExecuTorch's runtime on this machine has: its kernels and backends, or why it cannot be used."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from exir_lowering._upstream import locks
from exir_lowering._upstream.runtime import executorch_runtime
from exir_lowering.errors import InputError

bridged: set[str] = set()  # ids of Python delegates that are registered in the runtime, which are not its own backends
_loaded: dict[str, bool] = {}  # libraries that this process has loaded, and whether they have registered anything


def runtime_failure() -> str | None:
    """Return why ExecuTorch's runtime cannot be used on this machine, as a clause; None if it can."""
    try:
        executorch_runtime()
    except MemoryError:
        raise
    except Exception as error:  # anything that its libraries may raise when they are imported
        return f"the ExecuTorch runtime cannot be imported here ({type(error).__name__}: {error})"
    return None


def kernels() -> frozenset[str] | None:
    """Return the operators, such as "aten::add.out", for which the runtime has kernels; None without a runtime."""
    return frozenset(executorch_runtime()._get_operator_names()) if runtime_failure() is None else None


def backends() -> list[str]:
    """Return the ids of the backends that the runtime has, built in or registered later; none without a runtime."""
    return list(executorch_runtime()._get_registered_backend_names()) if runtime_failure() is None else []


def own_backends() -> frozenset[str]:
    """Return the ids of the backends that the runtime of this machine includes; empty if there is no runtime."""
    return frozenset(backends()) - bridged


def is_available(backend_id: str) -> bool:
    """Return whether one of the runtime's backends has what it needs on this machine."""
    return bool(executorch_runtime()._is_available(backend_id))


def load_libraries(who: str, given: Sequence[str | os.PathLike[str]], *, here: bool = True) -> tuple[str, ...]:
    """Load C++ libraries into this process, or only return their paths; InputError for one that is of no use."""
    listed = given if isinstance(given, (list, tuple)) else [given]
    for one in listed:
        if not isinstance(one, (str, os.PathLike)) or not os.path.isfile(one):
            raise InputError(f"{who}: libraries: got {one!r}, expected a list of paths of files, such as 'libnpu.so'.")
    paths = tuple(map(os.path.realpath, listed))
    with locks.engine():
        for path in paths if here and runtime_failure() is None else ():  # else opening the file says why
            before = backends(), kernels()
            try:
                ctypes.CDLL(path)
            except OSError as error:
                raise InputError(f"{who}: libraries: {path!r} cannot be loaded: {error}.") from error
            if not _loaded.setdefault(path, before != (backends(), kernels())):
                raise InputError(
                    f"{who}: libraries: {path!r} has registered nothing in the ExecuTorch runtime. Link it with the "
                    "wheel's, and load it before a Python delegate or another library has its id in this process, or "
                    "with limits=Limits()."
                )
    return paths
