"""Tuples of bytes on a socket."""

from __future__ import annotations

import socket
import struct
from typing import BinaryIO

from exir_lowering.steps.parallel.messages import Message

_NUMBER = struct.Struct("<Q")


def send_message(connection: socket.socket, message: Message) -> None:
    """Send a message; raise OSError if the other end is gone."""
    connection.sendall(b"".join(_NUMBER.pack(number) for number in (len(message), *map(len, message))))
    for part in message:
        connection.sendall(part)


def read_message(stream: BinaryIO) -> Message:
    """Read a message; raise EOFError or OSError if the other end is gone."""
    count = _NUMBER.unpack(_read(stream, _NUMBER.size))[0]
    lengths = [_NUMBER.unpack(_read(stream, _NUMBER.size))[0] for _ in range(count)]
    return tuple([_read(stream, length) for length in lengths])


def _read(stream: BinaryIO, length: int) -> bytes:
    content = stream.read(length)
    if len(content) != length:
        raise EOFError("the other end is gone")
    return content
