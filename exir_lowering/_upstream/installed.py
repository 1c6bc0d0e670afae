"""What ExecuTorch's runtime on this machine has: its kernels and backends, or why it cannot be used."""

from __future__ import annotations

from exir_lowering._upstream.runtime import executorch_runtime
from exir_lowering.errors.interrupts import let_through

bridged: set[str] = set()
"""Ids under which Python delegates are registered in the runtime, which has no backends of its own for them."""


def runtime_failure() -> str | None:
    """Return why ExecuTorch's runtime cannot be used on this machine, as a clause; None if it can."""
    try:
        executorch_runtime()
    except Exception as error:  # anything that its libraries may raise when they are imported
        let_through(error)
        return f"the ExecuTorch runtime cannot be imported here ({type(error).__name__}: {error})"
    return None


def kernels() -> frozenset[str] | None:
    """Return the operators for which the runtime of this machine has kernels; None if there is no runtime."""
    if runtime_failure() is not None:
        return None
    return frozenset(executorch_runtime().operator_registry.operator_names)


def own_backends() -> frozenset[str]:
    """Return the ids of the backends that the runtime of this machine includes; empty if there is no runtime."""
    if runtime_failure() is not None:
        return frozenset()
    return frozenset(executorch_runtime().backend_registry.registered_backend_names) - bridged
