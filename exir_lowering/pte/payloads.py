"""The payloads of backends in a file, checked by whoever knows the backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from exir_lowering.errors import BackendFailure, LoweringError, PluginLoadError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.plugins import availability, registry
from exir_lowering.plugins.payload import NEEDED, CheckedPayload
from exir_lowering.pte.container import Data
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.value_kinds import Layout, ValueSpec

_Result = TypeVar("_Result")


def check_payload(backend: str, payload: memoryview) -> CheckedPayload | None:
    """Check a payload, without what it is called with.

    Args:
        backend: The id of its backend. It selects among installed plug-ins, and does nothing else.
        payload: The payload, which is not copied.

    Returns:
        What remains to be checked of it; None when no plug-in checks the backend's payloads.

    Raises:
        CorruptError: The payload is damaged.
        PluginLoadError: What checks it cannot be loaded, or is missing for a backend that needs it in the runtime of
            this machine.
        BackendFailure: What checks it failed.
    """
    checks = registry.find_payload_checks(backend)
    if checks is None:
        if backend in NEEDED and backend in availability.own_backends():
            raise PluginLoadError(
                f"Payloads of {backend!r} are not given to the ExecuTorch runtime unchecked, and no entry point of "
                f"group {registry.PAYLOADS!r} has that name: the installation of exir-lowering is incomplete, or older "
                "than its source. Install it again."
            )
        return None
    checked = _guard(backend, checks, lambda: checks.check(payload))
    if not isinstance(checked, CheckedPayload):
        raise BackendFailure(f"{_describe(backend, checks)} returned {checked!r}, expected a CheckedPayload.")
    return checked


def check_call(backend: str, payload: CheckedPayload, arguments: Sequence[ValueSpec]) -> None:
    """Check what a payload is called with.

    Args:
        backend: The id of its backend.
        payload: The payload.
        arguments: What the file says of the values that it is called with.

    Raises:
        CorruptError: They are not what the payload needs.
        BackendFailure: What checks it failed.
    """
    _guard(backend, payload, lambda: payload.check_call(arguments))


def find_weights(backend: str, payload: CheckedPayload, data: Data, external: dict[str, Layout | int]) -> None:
    """Check the weights of a payload that are in the file's named data, and note those that are not.

    Args:
        backend: The id of its backend.
        payload: The payload.
        data: What is in the file.
        external: What weights that are in a data file have to be, by name, to which it is added.

    Raises:
        CorruptError: The file has fewer bytes of one than the payload reads.
    """
    for name, size in payload.weights.items():
        found = data.named.get(name)
        need = external.get(name, 0)
        if found is not None:
            if len(found) < size:
                raise CorruptError(f"a payload of {backend!r} reads {size} bytes of {name!r}, which has {len(found)}")
        elif isinstance(need, int):
            external[name] = max(need, size)


def _guard(backend: str, who: object, check: Callable[[], _Result]) -> _Result:
    """Return the result of a plug-in's check; what it raises is a verdict on the file, or a failure of its own."""
    try:
        return check()
    except (CorruptError, LoweringError):
        raise
    except Exception as error:
        let_through(error)
        raise BackendFailure(f"{_describe(backend, who)} failed: {type(error).__name__}: {error}") from error


def _describe(backend: str, plugin: object) -> str:
    return f"What checks the payloads of {backend!r}, {type(plugin).__module__}.{type(plugin).__qualname__},"
