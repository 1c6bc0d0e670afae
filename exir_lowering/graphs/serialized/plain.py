"""Plain arguments as JSON: what JSON has is itself, anything else an object whose only key says what it is.

Payloads of the reference backend are made of these. What is allowed here is safe to execute. The container is a header
of 24 bytes (magic, version, CRC-32 and length of the JSON, little-endian), then the JSON, usually compressed by zlib.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

from exir_lowering.errors import InputError
from exir_lowering.graphs.operators import pure

LARGEST = 1 << 28
"""The largest length of the JSON; a graph of 100,000 nodes has about 50 MB."""

DEEPEST = 60
"""How deep values may nest in values."""

_HEADER = struct.Struct("<8sIIQ")
_LEVEL = 1


class NotSerialisableError(InputError):
    """An argument cannot be written and read back exactly; the message says what."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not serialisable: {reason}")


@dataclass(frozen=True, slots=True)
class Container:
    """A kind of container."""

    magic: bytes
    version: int
    what: str  # what it contains, for messages
    advice: str = ""  # what to do about another version, a sentence
    compressed: bool = True

    def pack(self, tree: Any) -> bytes:
        """Write a tree of JSON; NotSerialisableError if it is too large."""
        try:
            body = json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()
        except (RecursionError, ValueError) as error:
            raise NotSerialisableError(f"{type(error).__name__}: {error}") from error
        if len(body) > LARGEST:
            raise NotSerialisableError(f"the graph takes {len(body)} bytes, at most {LARGEST} are supported")
        header = _HEADER.pack(self.magic, self.version, zlib.crc32(body), len(body))
        return header + (zlib.compress(body, _LEVEL) if self.compressed else body)

    def unpack(self, content: Any) -> Any:
        """Read a tree of JSON; InputError if it is something else, has another version, or is damaged."""
        start = bytes(content[:8]) if isinstance(content, (bytes, bytearray, memoryview)) else type(content).__name__
        if start != self.magic:
            raise InputError(f"This is not a {self.what}: it starts with {start!r}, expected {self.magic!r}.")
        version = int.from_bytes(content[8:12], "little")
        if version != self.version:
            raise InputError(
                f"A {self.what} has format version {version}; this exir-lowering reads version {self.version}."
                f"{self.advice}"
            )
        reader = zlib.decompressobj()
        try:
            *_, checksum, length = _HEADER.unpack_from(content)
            stored = memoryview(content)[_HEADER.size :]
            body = reader.decompress(stored, min(length, LARGEST) + 1) if self.compressed else bytes(stored)
            whole = not self.compressed or (reader.eof and not reader.unused_data)
            if len(body) != length or not whole or zlib.crc32(body) != checksum:
                raise ValueError("its length or checksum is wrong")
            return json.loads(body)
        except (struct.error, zlib.error, ValueError, RecursionError) as error:
            raise InputError(f"A {self.what} is damaged: {error}. Get the file from its source again.") from error


def pick(table: Sequence[Any], number: Any) -> Any:
    """Return an entry of a table; ValueError if there is none: negative numbers do not count from the end."""
    if type(number) is not int or not 0 <= number < len(table):
        raise ValueError(f"there is no entry {str(number)[:20]} in a table of {len(table)}")
    return table[number]


_NATIVE = (type(None), bool, int)
_FORMATS = {
    name: getattr(torch, name) for name in ("channels_last", "channels_last_3d", "contiguous_format", "preserve_format")
}


_LAYOUTS = {"strided": torch.strided}


class PlainWriter:
    """Writes plain arguments."""

    def __init__(self) -> None:
        self.writers: dict[type, Callable[[Any, int], Any]] = {
            str: lambda value, depth: value,
            float: lambda value, depth: value if math.isfinite(value) else {"float": repr(value)},
            complex: lambda value, depth: {"complex": [repr(value.real), repr(value.imag)]},
            **dict.fromkeys((list, immutable_list), self.list),
            tuple: lambda value, depth: {"tuple": self.list(value, depth)},
            **dict.fromkeys((dict, OrderedDict, immutable_dict), self._dict),
            torch.dtype: lambda value, depth: {"dtype": _find(pure.DTYPES, value)},
            torch.device: lambda value, depth: {"device": _find({"cpu": torch.device("cpu")}, value)},
            torch.layout: lambda value, depth: {"layout": _find(_LAYOUTS, value)},
            torch.memory_format: lambda value, depth: {"memory_format": _find(_FORMATS, value)},
        }

    def write(self, value: Any, depth: int = 0) -> Any:
        """Write a value; NotSerialisableError if it cannot be written exactly."""
        kind = type(value)
        if kind in _NATIVE:
            return value
        writer = self.writers.get(kind)
        if writer is None:
            raise NotSerialisableError(f"a value of the type {kind.__name__}: {str(value)[:200]}")
        if depth > DEEPEST:
            raise NotSerialisableError(f"a value that nests more than {DEEPEST} deep")
        return writer(value, depth + 1)

    def list(self, value: Sequence[Any], depth: int) -> Any:
        """Write each of several values."""
        return [self.write(item, depth) for item in value]

    def _dict(self, value: Mapping[Any, Any], depth: int) -> Any:
        return {"dict": [[self.write(key, depth), self.write(item, depth)] for key, item in value.items()]}


def _find(table: Mapping[str, Any], value: Any) -> str:
    for name, known in table.items():
        if known == value:
            return name
    raise NotSerialisableError(f"the value {value}")


class PlainReader:
    """Reads what `PlainWriter` wrote."""

    def __init__(self) -> None:
        many = self.many
        self.readers: dict[str, Callable[[Any, int], Any]] = {
            "tuple": lambda content, depth: tuple(many(content, depth)),
            "dict": lambda content, depth: {self.read(k, depth): self.read(v, depth) for k, v in content},
            "float": lambda content, depth: float(_short(content)),
            "complex": lambda content, depth: complex(*(float(_short(part)) for part in content)),
            "dtype": lambda content, depth: pure.DTYPES[content],
            "device": lambda content, depth: {"cpu": torch.device("cpu")}[content],
            "layout": lambda content, depth: _LAYOUTS[content],
            "memory_format": lambda content, depth: _FORMATS[content],
        }

    def read(self, tree: Any, depth: int = 0) -> Any:
        """Read a value; ValueError, LookupError or TypeError if it is not something that the writer makes."""
        if type(tree) is list:
            return self.many(tree, depth + 1)
        if type(tree) is not dict:
            return tree
        ((kind, content),) = tree.items()
        return self.readers[kind](content, depth + 1)

    def many(self, trees: Any, depth: int) -> list[Any]:
        """Read each of several values."""
        if type(trees) is not list or depth > DEEPEST + 1:
            raise ValueError("a sequence of values is a list, and nests to a limited depth")
        return [self.read(tree, depth) for tree in trees]


def _short(text: Any) -> str:
    if not isinstance(text, str) or len(text) > 40:
        raise ValueError("a number is a short text")
    return text
