"""The tables of a `.pte` file as dataclasses of ExecuTorch: read, changed and written."""

from __future__ import annotations

from typing import Any

# The tables of a `.pte` file as dataclasses; ExecuTorch only reads and writes them together with its segments.
from executorch.exir._serialize._flatbuffer_program import _flatbuffer_to_program, _program_to_flatbuffer

__all__ = [
    "read_tables",
    "write_tables",
]


def read_tables(tables: bytes) -> Any:
    """Read the tables of a `.pte` file, without its segments, as an `executorch.exir.schema.Program`."""
    return _flatbuffer_to_program(tables)


def write_tables(program: Any) -> bytes:
    """Return the tables of a `.pte` file, without its header; segments in them are relative to the first one."""
    tables: bytes = _program_to_flatbuffer(program).data
    return tables
