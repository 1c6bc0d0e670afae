"""Tables of `.pte` files as flatbuffers: what files of one kernel call are made of."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import flatbuffers
from flatbuffers import number_types

from exir_lowering.pte import slots
from exir_lowering.pte.value_kinds import CODES, Tensor

_REFERENCE = number_types.UOffsetTFlags
_INT8, _UINT8, _INT32 = number_types.Int8Flags, number_types.Uint8Flags, number_types.Int32Flags
_UINT32, _INT64, _UINT64 = number_types.Uint32Flags, number_types.Int64Flags, number_types.Uint64Flags

_Table = dict[int, Any]
"""The fields of a table, by their slots: a text, bytes, a table, a list of tables; a pair of a kind and numbers for a
vector, and of a kind and a number for a number. None, and a number that is 0, are left out."""


def _lay_out(segments: Iterable[memoryview], alignment: int) -> tuple[list[_Table], list[bytes | memoryview], int]:
    """Return tables that say where segments are, what they are made of, and where they end."""
    tables: list[_Table] = []
    pieces: list[bytes | memoryview] = []
    end = 0
    for segment in segments:
        pieces += [bytes(-end % alignment), segment]
        end += -end % alignment
        area = slots.DataSegment
        tables.append({area.OFFSET: (_UINT64, end), area.SIZE: (_UINT64, segment.nbytes)})
        end += segment.nbytes
    return tables, pieces, end


def _tensor(tensor: Tensor) -> _Table:
    of, dynamism = slots.Tensor, slots.TensorShapeDynamism
    return {
        of.SCALAR_TYPE: (_INT8, CODES[tensor.dtype]),
        of.SIZES: (_INT32, tensor.sizes),
        of.DIM_ORDER: bytes(tensor.dim_order),
        of.SHAPE_DYNAMISM: (_INT8, dynamism.DYNAMIC_BOUND if tensor.dynamic else dynamism.STATIC),
    }


def _allocation(start: int) -> _Table:
    of = slots.AllocationDetails
    return {of.MEMORY_ID: (_UINT32, 1), of.MEMORY_OFFSET_LOW: (_UINT32, start)}


def _build(root: _Table, identifier: bytes) -> bytes:
    """Return a flatbuffer; the identifier is the four bytes that tell its format."""
    builder = flatbuffers.Builder(1024)
    builder.Finish(_add_table(builder, root), file_identifier=identifier)
    return bytes(builder.Output())


def _add_table(builder: Any, fields: _Table) -> int:
    # What a table refers to is added before it.
    added = {slot: _field(builder, value) for slot, value in fields.items() if value is not None}
    builder.StartObject(max(added, default=-1) + 1)
    for slot, (kind, number) in added.items():
        if number:
            builder.PrependUOffsetTRelative(number) if kind is _REFERENCE else builder.Prepend(kind, number)
            builder.Slot(slot)
    return int(builder.EndObject())


def _field(builder: Any, value: Any) -> tuple[Any, int]:
    """Return the kind of a field, and its number, or where what it refers to was added."""
    if isinstance(value, str):
        return _REFERENCE, builder.CreateString(value)
    if isinstance(value, bytes):
        return _REFERENCE, builder.CreateByteVector(value)
    if isinstance(value, dict):
        return _REFERENCE, _add_table(builder, value)
    if isinstance(value, tuple) and isinstance(value[1], int):
        return value
    kind, items = (_REFERENCE, [_add_table(builder, one) for one in value]) if isinstance(value, list) else value
    builder.StartVector(kind.bytewidth, len(items), kind.bytewidth)
    for item in reversed(items):
        builder.PrependUOffsetTRelative(item) if kind is _REFERENCE else builder.Prepend(kind, item)
    return _REFERENCE, builder.EndVector()


def add_header(flatbuffer: bytes, alignment: int, space: int) -> bytes:
    """Return what precedes a `.pte` file's segments of `space` bytes: tables with a header, padded to an alignment."""
    header = struct.Struct("<4sIQQQ")
    size = header.size + len(flatbuffer)
    base = -(-size // alignment) * alignment
    packed = header.pack(b"eh00", header.size, size, base, space)
    (root,) = struct.unpack_from("<I", flatbuffer)
    parts = struct.pack("<I", root + len(packed)), flatbuffer[4:8], packed, flatbuffer[8:]
    return b"".join(parts).ljust(base, b"\0")
