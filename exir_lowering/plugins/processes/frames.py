"""Tuples of bytes on a socket."""

from __future__ import annotations

import socket
import struct
import time
from typing import TypeAlias

Message: TypeAlias = tuple[bytes, ...]
"""What travels to a worker and back: the first part is a header in JSON."""

_NUMBER = struct.Struct("<Q")
_CHUNK = 1 << 20
_MOST_PARTS = 1 << 20


class TooLateError(Exception):
    """A message was not there in time."""


def send_message(connection: socket.socket, message: Message, deadline: float | None = None) -> None:
    """Send a message; raise OSError if the other end is gone, TooLateError if it has not taken it by the deadline."""
    for part in (b"".join(_NUMBER.pack(number) for number in (len(message), *map(len, message))), *message):
        _wait_until(connection, deadline)
        try:
            connection.sendall(part)
        except TimeoutError:
            raise TooLateError from None


def read_message(connection: socket.socket, deadline: float | None = None) -> Message:
    """Read a message; raise EOFError or OSError if the other end is gone, TooLateError after the deadline.

    The deadline is a time of `time.monotonic`; None waits for as long as it takes.
    """
    count = _NUMBER.unpack(_read(connection, _NUMBER.size, deadline))[0]
    if count > _MOST_PARTS:
        raise EOFError(f"the other end announces {count} parts")
    lengths = [_NUMBER.unpack(_read(connection, _NUMBER.size, deadline))[0] for _ in range(count)]
    return tuple([_read(connection, length, deadline) for length in lengths])


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
    if deadline is None:
        connection.settimeout(None)
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TooLateError
    connection.settimeout(left)
