"""How an error gets from a worker to the process that called it: as its type and its text; the traceback is its cause.

Nothing else of an exception travels: it may hold objects of any kind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from exir_lowering import errors
from exir_lowering.errors import BackendFailure, LimitError, LoweringError
from exir_lowering.plugins.processes.frames import Message

_KINDS: Mapping[str, type[LoweringError]] = {
    kind.__name__: kind
    for kind in (
        errors.BackendContractError,
        errors.BackendUnavailableError,
        errors.InputError,
        errors.InvariantError,
        errors.PluginLoadError,
    )
}


class InWorkerError(Exception):
    """The cause of an error that a worker reported: its traceback there, as text."""


def write_error(error: BaseException, trace: str) -> Message:
    """Turn an error into bytes."""
    return (json.dumps(describe_error(error, trace)).encode(),)


def describe_error(error: BaseException, trace: str) -> dict[str, Any]:
    """Turn an error into the header of a message."""
    return {
        "kind": "error",
        "type": "MemoryError" if isinstance(error, MemoryError) else type(error).__name__,
        "text": str(error),
        "trace": trace,
        "handle": getattr(error, "debug_handle", None),
        "limit": getattr(error, "limit", None),
    }


def raise_error(header: Any) -> None:
    """Raise the error that a worker reported, if this is the header of one."""
    if header["kind"] == "error":
        raise _make_error(header) from InWorkerError(f"in the worker:\n{header['trace']}")


def _make_error(header: Any) -> BaseException:
    name, text = header["type"], header["text"]
    if name == "MemoryError":
        return MemoryError(text)
    if name == "BackendFailure":
        return BackendFailure(text, debug_handle=header["handle"])
    if name == "LimitError":
        return LimitError(text, limit=header["limit"])
    return _KINDS.get(name, LoweringError)(text)
