"""Merge several `.ptd` files into one, without copying their content into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import flatbuffers

from exir_lowering.pte import header
from exir_lowering.pte.container import segment_ranges
from exir_lowering.pte.data_slots import DataSegment, FlatTensor, NamedData, TensorLayout
from exir_lowering.pte.flatbuffer import Table, root

_ALIGNMENT = 4096  # of a segment; what its backend asked for is smaller, and not in the file


@dataclass(frozen=True, slots=True)
class _Datum:
    """A named datum: its key, its content, and the table of its layout."""

    key: str
    content: memoryview
    layout: Table | None


def write(file: BinaryIO, files: Sequence[memoryview]) -> None:
    """Write one `.ptd` file with the data of several; of data with the same name the first is taken.

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
    file.write(header.with_ptd_header(_tables(list(data.values()), offsets), _ALIGNMENT, end))
    for datum in data.values():
        file.write(datum.content)
        file.write(bytes(-len(datum.content) % _ALIGNMENT))


def _data(content: memoryview) -> list[_Datum]:
    extent = header.read_ptd(content)
    tables = root(content[: extent.tables])
    ranges = list(segment_ranges(tables.tables(FlatTensor.SEGMENTS)))
    found = []
    for one in tables.tables(FlatTensor.NAMED_DATA):
        offset, size = ranges[one.number(NamedData.SEGMENT_INDEX, "I")]
        start = extent.base + offset
        found.append(_Datum(one.text(NamedData.KEY), content[start : start + size], one.table(NamedData.TENSOR_LAYOUT)))
    return found


def _tables(data: Sequence[_Datum], offsets: Sequence[int]) -> bytes:
    """Return ExecuTorch's flat_tensor.fbs for data, without a header."""
    builder = flatbuffers.Builder(1024)
    named = []
    for number, datum in enumerate(data):
        key = builder.CreateString(datum.key)
        layout = _layout(builder, datum.layout) if datum.layout is not None else 0
        builder.StartObject(3)
        builder.PrependUOffsetTRelativeSlot(NamedData.KEY, key, 0)
        builder.PrependUint32Slot(NamedData.SEGMENT_INDEX, number, 0)
        builder.PrependUOffsetTRelativeSlot(NamedData.TENSOR_LAYOUT, layout, 0)
        named.append(builder.EndObject())
    segments = []
    for datum, offset in zip(data, offsets, strict=True):
        builder.StartObject(2)
        builder.PrependUint64Slot(DataSegment.OFFSET, offset, 0)
        builder.PrependUint64Slot(DataSegment.SIZE, len(datum.content), 0)
        segments.append(builder.EndObject())
    segments_at, named_at = _vector(builder, segments), _vector(builder, named)
    builder.StartObject(3)
    builder.PrependUOffsetTRelativeSlot(FlatTensor.SEGMENTS, segments_at, 0)
    builder.PrependUOffsetTRelativeSlot(FlatTensor.NAMED_DATA, named_at, 0)
    builder.Finish(builder.EndObject(), file_identifier=header.PTD_MAGIC)
    return bytes(builder.Output())


def _layout(builder: flatbuffers.Builder, layout: Table) -> int:
    sizes, order = layout.numbers(TensorLayout.SIZES, "i"), layout.numbers(TensorLayout.DIM_ORDER, "B")
    builder.StartVector(4, len(sizes), 4)
    for size in reversed(sizes):
        builder.PrependInt32(size)
    sizes_at = builder.EndVector()
    order_at = builder.CreateByteVector(bytes(order))
    builder.StartObject(3)
    builder.PrependInt8Slot(TensorLayout.SCALAR_TYPE, layout.number(TensorLayout.SCALAR_TYPE, "b"), 0)
    builder.PrependUOffsetTRelativeSlot(TensorLayout.SIZES, sizes_at, 0)
    builder.PrependUOffsetTRelativeSlot(TensorLayout.DIM_ORDER, order_at, 0)
    return int(builder.EndObject())


def _vector(builder: flatbuffers.Builder, tables: Sequence[int]) -> int:
    builder.StartVector(4, len(tables), 4)
    for table in reversed(tables):
        builder.PrependUOffsetTRelative(table)
    return int(builder.EndVector())
