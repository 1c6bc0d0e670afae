"""Errors that another process reports: as data, with its traceback there as the cause here."""

from __future__ import annotations

import traceback
from typing import Any

from exir_lowering import errors


class WorkerDiedError(Exception):
    """The process that worked for this one ended; the message says how."""


class InWorkerError(Exception):
    """The cause of an error that a worker reported: its traceback there, as text."""


def describe_error(error: BaseException, raised: BaseException) -> dict[str, Any]:
    """Return the header that reports an error, with the traceback of what was raised."""
    return {
        "kind": "error",
        "type": "MemoryError" if isinstance(error, MemoryError) else type(error).__name__,
        "text": str(error),
        "trace": "".join(traceback.format_exception(raised)),
        "debug_handle": getattr(error, "debug_handle", None),
        "limit": getattr(error, "limit", None),
    }


_MORE = {"BackendFailure": ("debug_handle",), "LimitError": ("limit",)}
"""What the errors that a worker may report take besides a text."""

_PLAIN = ("BackendContractError", "BackendUnavailableError", "InputError", "InvariantError", "PluginLoadError")


def raise_error(header: dict[str, Any]) -> None:
    """Raise the error that a worker reported, if this is the header of one."""
    if header["kind"] != "error":
        return
    name = header["type"]
    kind: Any = getattr(errors, name) if name in (*_MORE, *_PLAIN) else errors.LoweringError
    cause = InWorkerError(f"in the worker:\n{header['trace']}")
    more = {each: header[each] for each in _MORE.get(name, ())}
    raise (MemoryError if name == "MemoryError" else kind)(header["text"], **more) from cause
