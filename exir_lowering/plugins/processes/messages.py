"""What travels between this process and a worker: a header in JSON and parts of bytes, which are read, never executed.

An error travels as its type and its text, since it may hold objects of any kind; the traceback there is its cause here.
"""

from __future__ import annotations

import json
import socket
import struct
import time
import traceback
from collections.abc import Sequence
from typing import Any, TypeAlias

from exir_lowering import errors

Message: TypeAlias = tuple[dict[str, Any], Sequence[Any]]
"""A header of what JSON has, and its parts: bytes, or on their way out something else with a buffer of bytes."""

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 20


class TooLateError(Exception):
    """A message was not there in time."""


class InWorkerError(Exception):
    """The cause of an error that a worker reported: its traceback there, as text."""


def send_message(connection: socket.socket, message: Message, deadline: float | None = None) -> None:
    """Send a message; raise OSError if the other end is gone, TooLateError if it has not taken it by the deadline."""
    header, parts = message
    first = json.dumps([header, [len(part) for part in parts]]).encode()
    for part in (_LENGTH.pack(len(first)) + first, *parts):
        _wait_until(connection, deadline)
        try:
            connection.sendall(part)
        except TimeoutError:
            raise TooLateError from None


def read_message(connection: socket.socket, deadline: float | None = None) -> Message:
    """Read a message; raise EOFError or OSError if the other end is gone, TooLateError after a `time.monotonic`."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size, deadline))
    header, lengths = json.loads(_read(connection, length, deadline))
    return header, [_read(connection, length, deadline) for length in lengths]


def _read(connection: socket.socket, length: int, deadline: float | None) -> bytes:
    parts, left = [], length
    while left:
        _wait_until(connection, deadline)
        try:
            part = connection.recv(min(left, _CHUNK))
        except TimeoutError:
            raise TooLateError from None
        if not part:
            raise EOFError("the other end is gone")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _wait_until(connection: socket.socket, deadline: float | None) -> None:
    """Let the next call on a socket wait until a time."""
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise TooLateError
    connection.settimeout(left)


def describe_error(error: BaseException, raised: BaseException) -> dict[str, Any]:
    """Return the header that reports an error, with the traceback of what was raised."""
    too_large = error.__cause__ if isinstance(error.__cause__, errors.PartitionTooLargeError) else None
    return {
        "kind": "error",
        "type": "MemoryError" if isinstance(error, MemoryError) else type(error).__name__,
        "text": str(error),
        "trace": "".join(traceback.format_exception(raised)),
        "debug_handle": getattr(error, "debug_handle", None),
        "limit": getattr(error, "limit", None),
        "too_large": too_large and [str(too_large), too_large.operators, too_large.bytes],
    }


_MORE = {"BackendFailure": ("debug_handle",), "LimitError": ("limit",)}
"""What the errors that a worker may report take besides a text."""

_PLAIN = ("BackendContractError", "BackendUnavailableError", "InputError", "InvariantError", "PluginLoadError")


def raise_error(header: dict[str, Any]) -> None:
    """Raise the error that a worker reported, if this is the header of one."""
    if header["kind"] != "error":
        return
    name = header["type"]
    kind: Any = errors.LoweringError
    if name in _MORE or name in _PLAIN:
        kind = getattr(errors, name)
    elif name == "MemoryError":
        kind = MemoryError
    more = {each: header[each] for each in _MORE.get(name, ())}
    cause: Exception = InWorkerError(f"in the worker:\n{header['trace']}")
    if header["too_large"] is not None:
        text, operators, size = header["too_large"]
        cause, cause.__cause__ = errors.PartitionTooLargeError(text, operators=operators, bytes=size), cause
    raise kind(header["text"], **more) from cause
