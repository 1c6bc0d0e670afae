"""The tables of a `.pte` file as dataclasses of ExecuTorch: read, changed and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The tables of a `.pte` file as dataclasses; ExecuTorch only reads and writes them together with its segments.
from executorch.exir._serialize._flatbuffer_program import _flatbuffer_to_program, _program_to_flatbuffer

# Writes a program that is not a graph but only calls a payload. Also inserts the header that says where the segments
# start between a flatbuffer's first bytes and its tables.
from executorch.exir._serialize._program import (
    PTEFile,
    _ExtendedHeader,
    _insert_flatbuffer_header,
    serialize_pte_binary,
)

from exir_lowering._upstream.delegates import named_data

__all__ = [
    "read_tables",
    "serialize",
    "write_tables",
]


def read_tables(tables: bytes) -> Any:
    """Read the tables of a `.pte` file, without its segments, as an `executorch.exir.schema.Program`."""
    return _flatbuffer_to_program(tables)


def write_tables(program: Any, segments: int, alignment: int) -> bytes:
    """Write the tables of a `.pte` file, padded so that the segments can follow.

    Args:
        program: The tables; they say where each segment is, relative to the first one.
        segments: How many bytes the segments have together.
        alignment: The position of the first segment is a multiple of this.
    """
    flat = _program_to_flatbuffer(program)
    header = _round_up(_ExtendedHeader.EXPECTED_LENGTH, flat.max_alignment)
    size = header + len(flat.data)
    start = _round_up(size, alignment)
    extent = _ExtendedHeader(program_size=size, segment_base_offset=start, segment_data_size=segments)
    tables: bytes = _insert_flatbuffer_header(
        flatbuffer_data=flat.data,
        magic_regex=r"ET[0-9a-zA-Z][0-9a-zA-Z]",
        header_data=extent.to_bytes().ljust(header, b"\0"),
    )
    return tables.ljust(start, b"\0")


def _round_up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def serialize(program: Any, named: Mapping[str, bytes], alignment: int) -> bytes:
    """Return a program of ExecuTorch's schema as a `.pte` file.

    Args:
        program: The program; it is changed.
        named: The file's named data.
        alignment: The alignment of the named data.
    """
    data = named_data(named, alignment) if named else None
    return bytes(serialize_pte_binary(PTEFile(program, named_data=data), extract_delegate_segments=True))
