"""Merge several `.ptd` files into one, without copying their content into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from exir_lowering.pte import header
from exir_lowering.pte.container import segment_ranges
from exir_lowering.pte.data_slots import DataSegment, FlatTensor, NamedData, TensorLayout
from exir_lowering.pte.flatbuffer import Table, root
from exir_lowering.pte.flatbuffer_writer import INT8, INT32, REFERENCE, UINT32, UINT64, FlatbufferWriter

_ALIGNMENT = 4096  # of a segment; what its backend asked for is smaller, and not in the file


@dataclass(frozen=True, slots=True)
class _Datum:
    """A named datum: its key, its content, and the table of its layout."""

    key: str
    content: memoryview
    layout: Table | None


def write(file: BinaryIO, files: Sequence[memoryview]) -> None:
    """Write one `.ptd` file with the data of several; of data with the same name the first is taken.

    The files were read by `container.read_data` already.
    """
    data: dict[str, _Datum] = {}
    for content in files:
        for datum in _data(content):
            data.setdefault(datum.key, datum)
    offsets, end = [], 0
    for datum in data.values():
        offsets.append(end)
        end += -(-len(datum.content) // _ALIGNMENT) * _ALIGNMENT
    file.write(header.add_ptd_header(_tables(list(data.values()), offsets), _ALIGNMENT, end))
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
    writer = FlatbufferWriter()
    named = []
    for number, datum in enumerate(data):
        key = writer.add_text(datum.key)
        layout = _add_layout(writer, datum.layout) if datum.layout is not None else 0
        named.append(
            writer.add_table(
                {
                    NamedData.KEY: (REFERENCE, key),
                    NamedData.SEGMENT_INDEX: (UINT32, number),
                    NamedData.TENSOR_LAYOUT: (REFERENCE, layout),
                }
            )
        )
    segments = [
        writer.add_table({DataSegment.OFFSET: (UINT64, offset), DataSegment.SIZE: (UINT64, len(datum.content))})
        for datum, offset in zip(data, offsets, strict=True)
    ]
    segments_at, named_at = writer.add_references(segments), writer.add_references(named)
    root_at = writer.add_table(
        {FlatTensor.SEGMENTS: (REFERENCE, segments_at), FlatTensor.NAMED_DATA: (REFERENCE, named_at)}
    )
    return writer.finish(root_at, header.PTD_MAGIC)


def _add_layout(writer: FlatbufferWriter, layout: Table) -> int:
    sizes = writer.add_numbers(INT32, layout.numbers(TensorLayout.SIZES, "i"))
    order = writer.add_bytes(bytes(layout.numbers(TensorLayout.DIM_ORDER, "B")))
    return writer.add_table(
        {
            TensorLayout.SCALAR_TYPE: (INT8, layout.number(TensorLayout.SCALAR_TYPE, "b")),
            TensorLayout.SIZES: (REFERENCE, sizes),
            TensorLayout.DIM_ORDER: (REFERENCE, order),
        }
    )
