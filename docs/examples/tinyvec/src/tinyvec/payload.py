r"""The payload: what the backend writes and the delegate reads. The only module that both of them import.

It starts with a header, little-endian: 4 bytes magic, b"TVEC"; 4 bytes version; 4 bytes CRC-32 of the rest; 4 bytes
length of the rest. The rest is a `Program` as JSON. Weights are not in it: it refers to named data of the file.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any

from exir_lowering import InputError, WeightRef

VERSION = 1
_MAGIC = b"TVEC"
_HEADER = struct.Struct("<4sIII")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operator call: its arguments as numbers of values, its options, the debug handle of its node or -1."""

    operator: str
    arguments: list[int]
    options: dict[str, Any]
    handle: int


@dataclass(frozen=True, slots=True)
class Program:
    """A program. Its values are numbered: the inputs, the weights, then the result of each instruction."""

    inputs: int
    weights: list[WeightRef]
    code: list[Instruction]
    outputs: list[int]

    @property
    def events(self) -> list[str]:
        """The identifier of each instruction in profiles; debug handles may occur twice."""
        return [f"{instruction.operator} #{number}" for number, instruction in enumerate(self.code)]


def dump(program: Program) -> bytes:
    """Write a program."""
    code = [[i.operator, i.arguments, i.options, i.handle] for i in program.code]
    weights = [ref.to_json() for ref in program.weights]
    body = json.dumps([program.inputs, weights, code, program.outputs], separators=(",", ":")).encode()
    return _HEADER.pack(_MAGIC, VERSION, zlib.crc32(body), len(body)) + body


def parse(payload: bytes) -> Program:
    """Read a program.

    Raises:
        InputError: The bytes are no payload of tinyvec, one of another version, cut off or damaged.
    """
    if len(payload) < _HEADER.size or payload[:4] != _MAGIC:
        raise InputError(
            f"This is no payload of tinyvec: it has {len(payload)} bytes and starts with {bytes(payload[:4])!r}, "
            f"expected {_MAGIC!r}."
        )
    _, version, checksum, length = _HEADER.unpack_from(payload)
    if version != VERSION:
        raise InputError(
            f"A payload of tinyvec has version {version}, expected {VERSION}. Lower the model again, or install the "
            "tinyvec that it was lowered with."
        )
    body = bytes(payload[_HEADER.size :])
    if len(body) != length:
        raise InputError(f"A payload of tinyvec is cut off: its program has {len(body)} bytes, expected {length}.")
    if zlib.crc32(body) != checksum:
        raise InputError("A payload of tinyvec is damaged: its checksum differs. Lower the model again.")
    inputs, weights, code, outputs = json.loads(body)
    return Program(inputs, [WeightRef.from_json(ref) for ref in weights], [Instruction(*i) for i in code], outputs)
