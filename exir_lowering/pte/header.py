"""Where the tables of a `.pte` or `.ptd` file end and its segments start: the header after the flatbuffer's identifier.

A header has its own length, so that versions of ExecuTorch can add fields. Old `.pte` files have no header, and no
segments. Numbers are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from exir_lowering.pte.flatbuffer import CorruptError

PTE_MAGIC = b"ET12"
PTD_MAGIC = b"FT01"
"""The identifiers of the flatbuffers, in bytes 4 to 8; `.pte` files of other versions start with "ET" too."""

_PTE_HEADER_MAGIC = b"eh00"
_PTD_HEADER_MAGIC = b"FH01"
_AT = 8
_PTE = struct.Struct("<4sIQQQ")  # magic, length, end of the tables, start of the segments, their size
_PTE_SHORT = 24  # the length of headers that lack the last field
_PTD = struct.Struct("<4sIQQQQ")  # magic, length, start of the tables, their size, start of the segments, their size
_PTD_PADDED = 48  # what ExecuTorch puts between the identifier and the tables


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the parts of a file are."""

    tables: int  # where they end
    base: int  # where the segments start; 0 when there are none
    space: int  # of the segments, in bytes


def read_pte(file: memoryview, whole: int | None = None) -> Extent:
    """Read a `.pte` file's header; `whole` says how many bytes it has. A CorruptError: it is none, or cut short."""
    available = len(file) if whole is None else whole
    if len(file) < 8:
        raise CorruptError(f"it has {len(file)} bytes")
    magic = bytes(file[4:8])
    if magic != PTE_MAGIC:
        raise CorruptError(f"its bytes 4 to 8 are {magic!r}, expected {PTE_MAGIC!r}")
    if len(file) < _AT + _PTE.size or bytes(file[8:12]) != _PTE_HEADER_MAGIC:
        return Extent(len(file), 0, 0)
    _, length, size, base, space = _PTE.unpack_from(file, _AT)
    if length < _PTE_SHORT:
        raise CorruptError(f"its header has {length} bytes, expected at least {_PTE_SHORT}")
    if length < _PTE.size or space == 0:
        space = max(available - base, 0)
    end = max(size, base + space) if base else size
    if end > available:
        raise CorruptError(
            f"its header says that there are {end} bytes, but the file has {available}; it may have been cut short"
        )
    if size < _AT + _PTE.size or (base and base < size):
        raise CorruptError(f"its header puts the segments at byte {base}, inside its {size} bytes of tables")
    return Extent(size, base, space if base else 0)


def size(file: memoryview) -> int:
    """Return how many bytes a file of either kind begins with that are neither tables nor segments."""
    if bytes(file[8:12]) not in (_PTE_HEADER_MAGIC, _PTD_HEADER_MAGIC):
        return _AT
    return _AT + int.from_bytes(file[12:16], "little")


def set_space(tables: bytearray, space: int) -> None:
    """Write the size of the segments into the header of a `.pte` file, in place; a CorruptError without a field."""
    magic, length, size, base, _ = _PTE.unpack_from(tables, _AT)
    if magic != _PTE_HEADER_MAGIC or length < _PTE.size:
        raise CorruptError("its header has no field for the size of its segments")
    _PTE.pack_into(tables, _AT, magic, length, size, base, space)


def read_ptd(file: memoryview) -> Extent:
    """Read the header of a `.ptd` file from its first bytes; a CorruptError when it is none, or was cut short."""
    if len(file) < _AT + _PTD.size:
        raise CorruptError(f"it has {len(file)} bytes")
    if bytes(file[4:8]) != PTD_MAGIC or bytes(file[8:12]) != _PTD_HEADER_MAGIC:
        raise CorruptError(
            f"it starts with {bytes(file[4:12])!r}, but a .ptd file has {PTD_MAGIC + _PTD_HEADER_MAGIC!r} there"
        )
    _, length, start, size, base, space = _PTD.unpack_from(file, _AT)
    if length < _PTD.size or start + size > len(file) or base + space > len(file):
        raise CorruptError(
            f"its header says that there are {max(start + size, base + space)} bytes, but the file has {len(file)}; "
            "it may have been cut short"
        )
    # Offsets in the tables count from the start of the file.
    return Extent(start + size, base, space)


def add_pte_header(flatbuffer: bytes, alignment: int, space: int) -> bytes:
    """Return what precedes a `.pte` file's segments of `space` bytes: tables with a header, padded to an alignment."""
    size = _PTE.size + len(flatbuffer)  # it keeps the tables' alignment
    base = -(-size // alignment) * alignment
    header = _PTE.pack(_PTE_HEADER_MAGIC, _PTE.size, size, base, space)
    return _insert(flatbuffer, header).ljust(base, b"\0")


def add_ptd_header(flatbuffer: bytes, alignment: int, space: int) -> bytes:
    """Return what precedes a `.ptd` file's segments of `space` bytes: tables with a header, padded to an alignment."""
    base = -(-(_PTD_PADDED + len(flatbuffer)) // alignment) * alignment
    header = _PTD.pack(_PTD_HEADER_MAGIC, _PTD.size, _PTD_PADDED, len(flatbuffer), base, space)
    return _insert(flatbuffer, header.ljust(_PTD_PADDED, b"\0")).ljust(base, b"\0")


def _insert(flatbuffer: bytes, header: bytes) -> bytes:
    """Insert a header after a flatbuffer's identifier."""
    (root,) = struct.unpack_from("<I", flatbuffer)
    return b"".join((struct.pack("<I", root + len(header)), flatbuffer[4:_AT], header, flatbuffer[_AT:]))
