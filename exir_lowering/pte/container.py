"""The outside of a `.pte` and of a `.ptd` file: where its tables end, its segments, and the data that has a name."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from exir_lowering.pte.flatbuffer import CorruptError, Table, root
from exir_lowering.pte.value_kinds import Layout, check_index, layout

PTE_MAGIC = b"ET12"
PTD_MAGIC = b"FT01"


@dataclass(frozen=True, slots=True)
class Data:
    """The places in a file that its methods may refer to.

    Attributes:
        segments: The segments, not copied.
        named: The segments that have a name.
        constants: Where each constant starts in its segment, and the segment.
        initial: The same for the initial values of each list of mutable tensors.
        inline_constants: The constants that an old file holds in its tables.
        inline_payloads: The payloads that are in the tables.
    """

    segments: tuple[memoryview, ...]
    named: Mapping[str, memoryview]
    constants: tuple[tuple[int, memoryview], ...]
    initial: tuple[tuple[tuple[int, memoryview], ...], ...]
    inline_constants: tuple[memoryview, ...]
    inline_payloads: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """Named data of a `.ptd` file.

    Attributes:
        content: The data, not copied.
        layout: What tensor it is; None for what only a backend reads.
    """

    content: memoryview
    layout: Layout | None

    def fits(self, need: Layout | int) -> bool:
        """Tell whether this is the tensor, or has the bytes, that a program needs."""
        if isinstance(need, Layout):
            return self.layout == need and len(self.content) >= need.size
        return len(self.content) >= need

    def __str__(self) -> str:
        return f"{len(self.content)} bytes" + (f" of {self.layout}" if self.layout is not None else "")


def open_program(file: memoryview) -> tuple[Table, Data]:
    """Return the root of a `.pte` file's tables, and the places that its methods may refer to.

    Args:
        file: The file's content, which is not copied.

    Raises:
        CorruptError: The file is not a `.pte` file.
    """
    if len(file) < 8:
        raise CorruptError(f"it has {len(file)} bytes")
    magic = bytes(file[4:8])
    if magic != PTE_MAGIC:
        raise CorruptError(f"bytes 4 to 8 are {magic!r}, they are {PTE_MAGIC!r} in a .pte file")
    tables, space = _pte_extent(file)
    program = root(tables)
    segments = _segments(program.tables(4), space)
    constants = program.table(5)
    data = Data(
        segments,
        _named(program.tables(7), segments),
        _offsets(constants, segments) if constants is not None else (),
        tuple(_offsets(table, segments) for table in program.tables(6)),
        tuple(table.content(0) for table in program.tables(2)),
        tuple(table.content(0) for table in program.tables(3)),
    )
    return program, data


def read_data(file: memoryview) -> dict[str, Weight]:
    """Find the data in a `.ptd` file, by name.

    Args:
        file: The file's content, which is neither copied nor read beyond its tables.

    Raises:
        CorruptError: The file is not a `.ptd` file that the runtime can be given.
    """
    if len(file) < 48:
        raise CorruptError(f"it has {len(file)} bytes")
    if bytes(file[4:8]) != PTD_MAGIC or bytes(file[8:12]) != b"FH01":
        raise CorruptError(f"it starts with {bytes(file[4:12])!r}, a .ptd file has {PTD_MAGIC + b'FH01'!r} there")
    length, start, size, base, space = struct.unpack_from("<IQQQQ", file, 12)
    if length < 40 or start + size > len(file) or base + space > len(file):
        raise CorruptError(
            f"its header tells of {max(start + size, base + space)} bytes, the file has {len(file)}; "
            "it may have been cut short"
        )
    # Offsets in the tables count from the start of the file.
    table = root(file[: start + size])
    segments = _segments(table.tables(1), file[base : base + space])
    contents = _named(table.tables(2), segments)
    return {
        name: Weight(contents[name], layout(described, *range(3)) if described is not None else None)
        for name, described in ((entry.text(0), entry.table(2)) for entry in table.tables(2))
    }


def tables_end(file: bytes | bytearray) -> int:
    """Return where the tables of a `.pte` file end, which was read before."""
    return len(_pte_extent(memoryview(file))[0])


def _pte_extent(file: memoryview) -> tuple[memoryview, memoryview]:
    """Return the part of the file that has its tables, and the one that has the segments."""
    if len(file) < 40 or bytes(file[8:12]) != b"eh00":
        return file, file[:0]
    length, size, base, space = struct.unpack_from("<IQQQ", file, 12)
    if length < 24:
        raise CorruptError(f"its header has {length} bytes, 24 or more are needed")
    if length < 32 or space == 0:
        space = max(len(file) - base, 0)
    end = max(size, base + space) if base else size
    if end > len(file):
        raise CorruptError(f"its header tells of {end} bytes, the file has {len(file)}; it may have been cut short")
    if size < 40 or (base and base < size):
        raise CorruptError(f"its header puts the segments at byte {base}, inside of {size} bytes of tables")
    return file[:size], file[base : base + space] if base else file[:0]


def _segments(tables: Iterable[Table], space: memoryview) -> tuple[memoryview, ...]:
    segments = []
    for number, table in enumerate(tables):
        offset, size = table.number(0, "Q"), table.number(1, "Q")
        if offset + size > len(space):
            raise CorruptError(
                f"segment {number} ends at byte {offset + size} of the segments, they have {len(space)} bytes; "
                "the file may have been cut short"
            )
        segments.append(space[offset : offset + size])
    return tuple(segments)


def _named(tables: Iterable[Table], segments: Sequence[memoryview]) -> dict[str, memoryview]:
    found = {}
    for table in tables:
        name, index = table.text(0), table.number(1, "I")
        if not name:
            raise CorruptError("it has data without a name")
        check_index(index, len(segments), f"the data {name!r}", "segments")
        found[name] = segments[index]
    return found


def _offsets(table: Table, segments: Sequence[memoryview]) -> tuple[tuple[int, memoryview], ...]:
    offsets = table.numbers(1, "Q")
    if not offsets:
        return ()
    index = table.number(0, "I")
    # A program whose only constant is the placeholder 0 has no segment for it.
    if offsets == (0,) and index >= len(segments):
        return ((0, memoryview(b"")),)
    check_index(index, len(segments), "a list of constants", "segments")
    return tuple((offset, segments[index]) for offset in offsets)
