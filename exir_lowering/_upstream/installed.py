"""What ExecuTorch's runtime on this machine has: its kernels and backends, or why it cannot be used."""

from __future__ import annotations

from exir_lowering._upstream.runtime import executorch_runtime

bridged: set[str] = set()  # ids of Python delegates that are registered in the runtime, which are not its own backends


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
