r"""The container of a program: a header of fixed size, then JSON, compressed by zlib.

The header, little-endian: 8 bytes magic; 4 bytes version; 4 bytes CRC-32 of the JSON; 8 bytes length of the JSON. Equal
trees give equal bytes in every process with the same zlib.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from exir_lowering.errors import InputError

LARGEST = 1 << 28
"""The largest length of the JSON; a graph of 100,000 nodes has about 50 MB."""

DEEPEST = 60
"""How deep values may nest in values, and graphs in graphs."""

_HEADER = struct.Struct("<8sIIQ")
_LEVEL = 1


class NotSerialisableError(InputError):
    """A program contains something that cannot be written and read back exactly; the message says what."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not serialisable: {reason}")


@dataclass(frozen=True, slots=True)
class Container:
    """A kind of container."""

    magic: bytes
    version: int
    what: str  # what it contains, for messages
    advice: str = ""  # what to do about another version, a sentence

    def pack(self, tree: Any) -> bytes:
        """Write a tree of JSON; NotSerialisableError if it is too large."""
        try:
            body = json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()
        except (RecursionError, ValueError) as error:
            raise NotSerialisableError(f"{type(error).__name__}: {error}") from error
        if len(body) > LARGEST:
            raise NotSerialisableError(f"the graph takes {len(body)} bytes, at most {LARGEST} are supported")
        return _HEADER.pack(self.magic, self.version, zlib.crc32(body), len(body)) + zlib.compress(body, _LEVEL)

    def unpack(self, content: Any) -> Any:
        """Read a tree of JSON; InputError if it is something else, has another version, or is damaged."""
        who, found = f"This is not a {self.what}", f"A {self.what}"
        if not isinstance(content, (bytes, bytearray, memoryview)) or len(content) < _HEADER.size:
            given = type(content).__name__ if not hasattr(content, "__len__") else f"{len(content)} bytes"
            raise InputError(f"{who}, or a truncated one: got {given}, expected at least {_HEADER.size} bytes.")
        magic, version, checksum, length = _HEADER.unpack_from(content)
        if magic != self.magic:
            raise InputError(f"{who}: it starts with {magic!r}, expected {self.magic!r}.")
        if version != self.version:
            raise InputError(
                f"{found} has format version {version}; this exir-lowering reads version {self.version}.{self.advice}"
            )
        if length > LARGEST:
            raise InputError(f"{found} declares {length} bytes, expected at most {LARGEST}.")
        reader = zlib.decompressobj()
        try:
            body = reader.decompress(memoryview(content)[_HEADER.size :], length + 1)
        except zlib.error as error:
            raise InputError(f"{found} is damaged: {error}.") from error
        if not reader.eof and len(body) <= length:
            raise InputError(f"{found} is truncated: got {len(body)} bytes of JSON, expected {length}.")
        if reader.unused_data:
            raise InputError(f"{found} is followed by other data.")
        if len(body) != length or zlib.crc32(body) != checksum:
            raise InputError(
                f"{found} is damaged: its length or checksum is wrong. Get the file from its source again."
            )
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{found} is damaged: {type(error).__name__}: {error}") from error


PROGRAM = Container(b"EXIRPROG", 1, "serialised program")


def pick(table: Sequence[Any], number: Any) -> Any:
    """Return an entry of a table; ValueError if there is none: negative numbers do not count from the end."""
    if type(number) is not int or not 0 <= number < len(table):
        raise ValueError(f"there is no entry {str(number)[:20]} in a table of {len(table)}")
    return table[number]
