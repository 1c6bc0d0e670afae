"""What can execute a backend's payloads on this machine: ExecuTorch's runtime itself, a delegate, or nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from exir_lowering._upstream import installed
from exir_lowering.errors import (
    BackendFailure,
    BackendUnavailableWarning,
    LoweringError,
    UnknownPluginError,
    exception_text,
    explained,
)
from exir_lowering.plugins import registry
from exir_lowering.plugins.delegate import Delegate

POSSIBLE = "execution is still possible by saving and loading where the backend is available"
"""The end of the warning: the model is lowered, but cannot be executed here."""

_EXTRAS = {
    **{"CoreMLBackend": "coreml", "OpenvinoBackend": "openvino"},
    **dict.fromkeys(("EthosUBackend", "TOSABackend"), "ethos-u"),
}


def installation(backend_id: str) -> str:
    """Return how to install what a backend needs, after a colon, if an extra provides it, or nothing."""
    return f': pip install "exir-lowering[{_EXTRAS[backend_id]}]"' if backend_id in _EXTRAS else ""


@dataclass(frozen=True, slots=True)
class Missing:
    """Nothing executes a backend's payloads here."""

    reason: str  # a clause
    advice: str  # sentences that say what to do


def executor(backend_id: str, given: Mapping[str, Any] | None = None) -> Delegate | Missing | None:
    """Find what executes a backend's payloads: an available delegate, preferably a given one; None for the runtime."""
    own = installed.own_backends()
    has = f"It has {', '.join(sorted(own)) or 'none'}."
    if backend_id in own and backend_id not in (given or ()):
        if installed.is_available(backend_id):
            return None
        reason = "the ExecuTorch runtime here says that it is not available"
        install = f"install what the backend needs{installation(backend_id)}"
        return Missing(reason, f"{has} Lower the model for another one, or {install}.")
    try:
        delegate = registry.find_delegate(backend_id, given)
    except UnknownPluginError as error:
        reason = installed.runtime_failure() or "the ExecuTorch runtime here does not have it"
        return Missing(reason, f"{has} {error} Or lower the model for one of the runtime's backends.")
    who = f"its delegate {type(delegate).__module__}.{type(delegate).__qualname__}"
    with explained(lambda error: BackendFailure(f"{who} failed in is_available: {exception_text(error)}")):
        available = delegate.is_available()
    if available:
        return delegate
    reason = f"{who} says that it is not available on this machine"
    return Missing(reason, "Install what it needs, or load the file where it is available.")


def warn_unavailable(backend_ids: Iterable[str]) -> None:
    """Warn, once per backend, that payloads for it cannot be executed here."""
    for backend_id in backend_ids:
        try:
            found = executor(backend_id)
            reason = found.reason if isinstance(found, Missing) else None
        except LoweringError as error:
            reason = str(error).rstrip(".")
        if reason is not None:
            warnings.warn(
                f"Backend {backend_id!r} is not available here: {reason}. The model was lowered for it; {POSSIBLE}.",
                BackendUnavailableWarning,
                stacklevel=3,  # from the caller of our caller
            )
