"""Put several `.ptd` files together in one, without a copy of their content in memory."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import flatbuffers

from exir_lowering.pte.flatbuffer import Table, root

_ALIGNMENT = 4096  # of a segment; what its backend asked for is not in the file, and is less
_HEADER = struct.Struct("<4sIQQQQ")
_HEADER_SIZE = 48  # with padding, as ExecuTorch has it
_MAGIC = b"FH01"
_IDENTIFIER = b"FT01"


@dataclass(frozen=True, slots=True)
class _Datum:
    """A named datum: its key, its content, and the table of its layout."""

    key: str
    content: memoryview
    layout: Table | None


def write(file: BinaryIO, files: Sequence[memoryview]) -> None:
    """Write one `.ptd` file with all that several have; of data of one name the first is taken.

    Args:
        file: Where it is written.
        files: The files, which were read by `container.read_data` already.
    """
    data: dict[str, _Datum] = {}
    for content in files:
        for datum in _data(content):
            data.setdefault(datum.key, datum)
    offsets, end = [], 0
    for datum in data.values():
        offsets.append(end)
        end += -(-len(datum.content) // _ALIGNMENT) * _ALIGNMENT
    tables = _tables(list(data.values()), offsets)
    size = _HEADER_SIZE + len(tables)
    base = -(-size // _ALIGNMENT) * _ALIGNMENT
    header = _HEADER.pack(_MAGIC, _HEADER.size, _HEADER_SIZE, len(tables), base, end)
    file.write(struct.pack("<I", struct.unpack_from("<I", tables)[0] + _HEADER_SIZE) + tables[4:8])
    file.write(header.ljust(_HEADER_SIZE, b"\0") + tables[8:])
    file.write(bytes(base - size))
    for datum in data.values():
        file.write(datum.content)
        file.write(bytes(-len(datum.content) % _ALIGNMENT))


def _data(content: memoryview) -> list[_Datum]:
    _, _, start, size, base, _ = _HEADER.unpack_from(content, 8)
    tables = root(content[: start + size])
    places = [(base + one.number(0, "Q"), one.number(1, "Q")) for one in tables.tables(1)]
    found = []
    for one in tables.tables(2):
        at, length = places[one.number(1, "I")]
        found.append(_Datum(one.text(0), content[at : at + length], one.table(2)))
    return found


def _tables(data: Sequence[_Datum], offsets: Sequence[int]) -> bytes:
    """Return ExecuTorch's flat_tensor.fbs for data, without a header."""
    builder = flatbuffers.Builder(1024)
    named = []
    for number, datum in enumerate(data):
        key = builder.CreateString(datum.key)
        layout = _layout(builder, datum.layout) if datum.layout is not None else 0
        builder.StartObject(3)
        builder.PrependUOffsetTRelativeSlot(0, key, 0)
        builder.PrependUint32Slot(1, number, 0)
        builder.PrependUOffsetTRelativeSlot(2, layout, 0)
        named.append(builder.EndObject())
    segments = []
    for datum, offset in zip(data, offsets, strict=True):
        builder.StartObject(2)
        builder.PrependUint64Slot(0, offset, 0)
        builder.PrependUint64Slot(1, len(datum.content), 0)
        segments.append(builder.EndObject())
    vectors = [_vector(builder, segments), _vector(builder, named)]
    builder.StartObject(3)
    for slot, vector in enumerate(vectors, 1):
        builder.PrependUOffsetTRelativeSlot(slot, vector, 0)
    builder.Finish(builder.EndObject(), file_identifier=_IDENTIFIER)
    return bytes(builder.Output())


def _layout(builder: flatbuffers.Builder, layout: Table) -> int:
    sizes, order = layout.numbers(1, "i"), layout.numbers(2, "B")
    builder.StartVector(4, len(sizes), 4)
    for size in reversed(sizes):
        builder.PrependInt32(size)
    sizes_at = builder.EndVector()
    order_at = builder.CreateByteVector(bytes(order))
    builder.StartObject(3)
    builder.PrependInt8Slot(0, layout.number(0, "b"), 0)
    builder.PrependUOffsetTRelativeSlot(1, sizes_at, 0)
    builder.PrependUOffsetTRelativeSlot(2, order_at, 0)
    return int(builder.EndObject())


def _vector(builder: flatbuffers.Builder, tables: Sequence[int]) -> int:
    builder.StartVector(4, len(tables), 4)
    for table in reversed(tables):
        builder.PrependUOffsetTRelative(table)
    return int(builder.EndVector())
