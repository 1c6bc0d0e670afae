r"""The container of a serialised program: a header of fixed size, then JSON, compressed by zlib.

The header, little-endian: 8 bytes magic, b"EXIRPROG"; 4 bytes version; 4 bytes CRC-32 of the JSON; 8 bytes length of
the JSON. Equal trees give equal bytes in every process with the same zlib.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from exir_lowering.errors import InputError

VERSION = 1
LARGEST = 1 << 28
"""The largest length of the JSON; a graph of 100,000 nodes has about 50 MB."""

DEEPEST = 60
"""How deep values may nest in values, and graphs in graphs."""

_MAGIC = b"EXIRPROG"
_HEADER = struct.Struct("<8sIIQ")
_LEVEL = 1


class NotSerialisableError(InputError):
    """A program has something that cannot be written such that reading gives the same; the message says what."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not serialisable: {reason}")


def pack(tree: Any) -> bytes:
    """Write a tree of JSON; NotSerialisableError if it is too large."""
    try:
        body = json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()
    except (RecursionError, ValueError) as error:
        raise NotSerialisableError(f"{type(error).__name__}: {error}") from error
    if len(body) > LARGEST:
        raise NotSerialisableError(f"the graph takes {len(body)} bytes, at most {LARGEST} are supported")
    return _HEADER.pack(_MAGIC, VERSION, zlib.crc32(body), len(body)) + zlib.compress(body, _LEVEL)


def unpack(content: bytes) -> Any:
    """Read a tree of JSON; InputError if it is no serialised program, has another version, or is damaged."""
    who = "This is not a serialised program"
    if not isinstance(content, bytes) or len(content) < _HEADER.size:
        given = f"{len(content)} bytes" if isinstance(content, bytes) else type(content).__name__
        raise InputError(f"{who}, or a truncated one: got {given}, expected at least {_HEADER.size} bytes.")
    magic, version, checksum, length = _HEADER.unpack_from(content)
    if magic != _MAGIC:
        raise InputError(f"{who}: it starts with {magic!r}, expected {_MAGIC!r}.")
    if version != VERSION:
        raise InputError(f"A serialised program has version {version}; this exir-lowering reads version {VERSION}.")
    if length > LARGEST:
        raise InputError(f"A serialised program declares {length} bytes, expected at most {LARGEST}.")
    reader = zlib.decompressobj()
    try:
        body = reader.decompress(memoryview(content)[_HEADER.size :], length + 1)
    except zlib.error as error:
        raise InputError(f"A serialised program is damaged: {error}.") from error
    if len(body) != length or not reader.eof or reader.unused_data or zlib.crc32(body) != checksum:
        raise InputError("A serialised program is damaged: its length or checksum is wrong.")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"A serialised program is damaged: {type(error).__name__}: {error}") from error


def pick(table: Sequence[Any], number: Any) -> Any:
    """Return an entry of a table; ValueError if there is none: negative numbers do not count from the end."""
    if type(number) is not int or not 0 <= number < len(table):
        raise ValueError(f"there is no entry {str(number)[:20]} in a table of {len(table)}")
    return table[number]
