"""Seal what is emitted: digests of all its parts go into the `.pte` file and its data files; see `digests`."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from executorch.exir import ExecutorchProgramManager

from exir_lowering._upstream.delegates import add_last_named_data
from exir_lowering._upstream.emission import (
    adding_to_data_files,
    cord_piece,
    data_file_contents,
    pte_contents,
    set_cord_piece,
    write_buffer,
)
from exir_lowering.errors import InvariantError
from exir_lowering.pte import digests

_HEADER = struct.Struct("<4sIQQQ")  # ExecuTorch's: magic, length, size of the tables, first segment, bytes of segments
_HEADER_AT = 8
_SEGMENTS = 4  # their field in the root table of program.fbs


@contextmanager
def reserving(edge: Any) -> Iterator[None]:
    """Reserve the places of the digests in what an `EdgeProgramManager` emits while the context lasts.

    Raises:
        ValueError: A delegate brings named data of the same key.
    """
    add_last_named_data(edge, digests.KEY, digests.RESERVED)
    with adding_to_data_files(_data_segments):
        yield


def seal(manager: ExecutorchProgramManager) -> None:
    """Put the digests into their places.

    Args:
        manager: What was emitted while the places were reserved; it is changed.

    Raises:
        InvariantError: The places are not there.
    """
    data = {name: _seal_data(cord) for name, cord in data_file_contents(manager).items()}
    _seal_program(pte_contents(manager), {data_name(name): digest for name, digest in data.items()})


def data_name(name: str) -> str:
    """Return the name of a data file by the tag that ExecuTorch knows it by."""
    return name if name.endswith(".ptd") else f"{name}.ptd"


def _data_segments(buffers: Sequence[Any]) -> tuple[str, bytes]:
    """Return the key and content of the digests that come after a data file's segments."""
    made: list[bytes] = []
    for buffer in buffers:
        one = digests.RangeDigests([len(buffer)])
        write_buffer(buffer, one)
        made += one.digests()
    return digests.data_key(), digests.encode_segments(made)


def _seal_data(cord: Any) -> str:
    tables, segments = cord_piece(cord, 0), cord_piece(cord, -1)
    try:
        digest = digests.data_digest(tables, digests.NO_DIGEST, segments)
        set_cord_piece(cord, 0, digests.with_data_digest(tables, digests.NO_DIGEST, digest))
    except digests.SealError as error:
        raise InvariantError(f"An emitted data file cannot be sealed: {error}.") from error
    return digest


def _seal_program(cord: Any, data: Mapping[str, str]) -> None:
    tables = bytearray(cord_piece(cord, 0))
    magic, length, size, base, space = _HEADER.unpack_from(tables, _HEADER_AT)
    segments, reserved = _segments(tables), len(digests.RESERVED)
    if (magic, base + space) != (b"eh00", len(cord)) or cord_piece(cord, -1) != digests.RESERVED:
        raise InvariantError("An emitted program cannot be sealed: the reserved segment is not its last one.")
    sealed = digests.size(len(segments) - 1, data)
    struct.pack_into("<Q", tables, segments[-1][1], sealed)
    _HEADER.pack_into(tables, _HEADER_AT, magic, length, size, base, space - reserved + sealed)
    set_cord_piece(cord, 0, bytes(tables))
    made = digests.RangeDigests([base, *(base + start for start, _ in segments[1:])])
    cord.write_to_file(made)
    first, *rest = made.digests()
    set_cord_piece(cord, -1, digests.Seal(first, tuple(rest), data).encode())


def _segments(tables: bytes | bytearray) -> list[tuple[int, int]]:
    """Return where each segment starts, relative to the first, and where in the tables its size is.

    ExecuTorch has no way to change a size in tables that it has written: they are read as the flatbuffer that they are.
    """

    def number(code: str, at: int) -> int:
        return int(struct.unpack_from(f"<{code}", tables, at)[0])

    def field(table: int, slot: int) -> int | None:
        """Return where a field of a table is; None when it has its default, 0."""
        description = table - number("i", table)
        known = 4 + 2 * slot < number("H", description)
        offset = number("H", description + 4 + 2 * slot) if known else 0
        return table + offset if offset else None

    vector = field(number("I", 0), _SEGMENTS)
    if vector is None:
        raise InvariantError("An emitted program cannot be sealed: it has no segments.")
    start = vector + number("I", vector)
    places = []
    for at in range(start + 4, start + 4 + 4 * number("I", start), 4):
        offset, size = (field(at + number("I", at), slot) for slot in (0, 1))
        places.append((0 if offset is None else number("Q", offset), 0 if size is None else size))
    return places
