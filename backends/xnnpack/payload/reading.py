"""Read the graph in an XNNPACK payload, as `executorch/backends/xnnpack/serialization/schema.fbs` lays it out."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from exir_lowering.backends.xnnpack.payload.graph import (
    BITS,
    LISTS,
    MAX_RANK,
    NO_VALUE,
    NODES,
    QBINT4,
    REALS,
    Buffer,
    ConstantDataOffset,
    Graph,
    GraphValue,
    Node,
    PerChannelGroupQuant,
    PerChannelQuant,
    PerTokenDynamicQuant,
    XNNGraph,
    XNNQuantizedTensorValue,
    XNNQuantParams,
    XNNTensorValue,
    XNode,
    XValue,
    XValueUnion,
)
from exir_lowering.backends.xnnpack.payload.shapes import check_nodes, infer
from exir_lowering.graphs.operators.budget import free_memory
from exir_lowering.plugins.payload import CorruptError, Table, check_index, root

_HEADER = struct.Struct("<4x4sHIIIQ")
_MAGIC = b"XH00"
_VERSIONS = (b"XN00", b"XN01")
_MAX_EXTERNALS = 4096
_INPUT, _OUTPUT = 1, 2
"""The flags of values that the payload is called with."""


_OF_CHANNELS = (PerChannelQuant.SCALE, PerChannelQuant.SCALE_BUFFER_IDX, PerChannelQuant.NUM_SCALES)
_OF_GROUPS = (PerChannelGroupQuant.SCALE, PerChannelGroupQuant.SCALE_BUFFER_IDX, PerChannelGroupQuant.NUM_SCALES)


@dataclass(frozen=True, slots=True)
class _Constants:
    """Where the constants of a payload are."""

    sizes: Sequence[int | None]  # in bytes; None for one that is in a file's named data
    names: Mapping[int, str]  # of those in named data
    read: dict[str, int] = field(default_factory=dict)  # how many bytes are read of each name

    def take(self, index: int, size: int, who: str) -> None:
        """Record that some bytes of a constant are read."""
        check_index(index, len(self.sizes), who, "constants")
        available = self.sizes[index]
        if available is None:
            name = self.names[index]
            self.read[name] = max(self.read.get(name, 0), size)
        elif size > available:
            raise CorruptError(f"{who} reads {size} bytes of constant {index}, which has {available}")


def read_graph(payload: memoryview) -> Graph:
    """Read the graph in a payload, of which only the tables are read; CorruptError if it is damaged or unknown."""
    tables, space = split_payload(payload)
    if len(tables) < 8 or bytes(tables[4:8]) not in _VERSIONS:
        raise CorruptError(f"it starts with {bytes(tables[:8])!r}, expected {_VERSIONS!r} at byte 4")
    table = root(tables)
    if not table.has(XNNGraph.XNODES) or not table.has(XNNGraph.XVALUES):
        raise CorruptError("it has no nodes, or no values")
    externals = table.number(XNNGraph.NUM_EXTERNS, "I")
    if externals > _MAX_EXTERNALS:
        raise CorruptError(f"it is called with {externals} values, expected at most {_MAX_EXTERNALS}")
    constants = _constants(table, space)
    values: dict[int, GraphValue] = {}
    for number, one in enumerate(table.tables(XNNGraph.XVALUES)):
        value = _value(one, constants, externals)
        if value.id in values or value.id == NO_VALUE:
            raise CorruptError(f"value {number} has the number {value.id}, which another value also has")
        values[value.id] = value
    taken = [value.external for value in values.values() if value.external is not None]
    if len(set(taken)) != len(taken):
        raise CorruptError("two values are the same external value")
    nodes = tuple(_node(number, one, values) for number, one in enumerate(table.tables(XNNGraph.XNODES)))
    check_nodes(values, nodes)
    return Graph(values, nodes, constants.read, _check_shapes(values, nodes))


def _check_shapes(values: Mapping[int, GraphValue], nodes: Sequence[Node]) -> str:
    """Check the declared shapes, for which XNNPACK allocates memory; return what contradicts them, "" if nothing."""
    free, found = free_memory(), ""
    given = {id_: value.dims for id_, value in values.items() if value.given}
    for id_, shape in infer(values, nodes, given, bounds=True).items():
        value = values[id_]
        if math.prod(value.dims) != math.prod(shape):  # the order of the declared dimensions may differ
            found = found or (
                f"value {id_} is declared with the shape {list(value.dims)}, but its node makes {list(shape)}"
            )
        if free is not None and max(_size(value.datatype, dims) for dims in (shape, value.dims)) > free:
            raise CorruptError(f"value {id_} has the shape {list(shape)}, but only {free} bytes are free")
    return found


def split_payload(payload: memoryview) -> tuple[memoryview, int | None]:
    """Return a payload's tables, and how many bytes of constants follow; None if they are in the tables."""
    if len(payload) < _HEADER.size or bytes(payload[4:8]) != _MAGIC:
        return payload, None
    _, length, start, size, constants, space = _HEADER.unpack_from(payload)
    if length < _HEADER.size:
        raise CorruptError(f"its header has {length} bytes, expected {_HEADER.size}")
    end = max(start + size, constants + space)
    if end > len(payload):
        raise CorruptError(f"its header says that there are {end} bytes, but it has {len(payload)}")
    return payload[start : start + size], space


def _constants(table: Table, space: int | None) -> _Constants:
    if space is None:
        return _Constants([one.count(Buffer.STORAGE) for one in table.tables(XNNGraph.CONSTANT_BUFFER)], {})
    sizes: list[int | None] = []
    names = {}
    for number, one in enumerate(table.tables(XNNGraph.CONSTANT_DATA)):
        if one.has(ConstantDataOffset.NAMED_KEY):
            names[number] = one.text(ConstantDataOffset.NAMED_KEY)
            sizes.append(None)
            continue
        start, size = one.number(ConstantDataOffset.OFFSET, "Q"), one.number(ConstantDataOffset.SIZE, "Q")
        # Constants without content, such as the first one, have none.
        if number and start + size > space:
            raise CorruptError(f"constant {number} ends at byte {start + size} of {space}")
        sizes.append(size if size else max(space - start, 0))
    return _Constants(sizes, names)


def _value(table: Table, constants: _Constants, externals: int) -> GraphValue:
    kind, content = table.number(XValue.XVALUE_UNION_TYPE, "B"), table.table(XValue.XVALUE_UNION)
    quantised = kind == XValueUnion.XNN_QUANTIZED_TENSOR_VALUE
    if (kind != XValueUnion.XNN_TENSOR_VALUE and not quantised) or content is None:
        raise CorruptError(f"a value has the unknown type {kind}, or no content")
    tensor = content.table(XNNQuantizedTensorValue.TENSOR_VALUE) if quantised else content
    if tensor is None:
        raise CorruptError("a quantised value has no tensor")
    slots = XNNTensorValue
    datatype, dims = tensor.number(slots.DATATYPE, "h"), tensor.numbers(slots.DIMS, "I")
    number = tensor.number(slots.ID_OUT, "I")
    who = f"value {number}"
    if datatype not in BITS:
        raise CorruptError(f"{who} has the unknown datatype {datatype}")
    rank = tensor.number(slots.NUM_DIMS, "I")
    if rank != len(dims) or rank > MAX_RANK or math.prod(dims) >= 1 << 40:
        raise CorruptError(f"{who} has {rank} dimensions, but lists {list(dims)}")
    if tensor.number(slots.DQ_DATATYPE, "h"):
        raise CorruptError(f"{who} is quantised in a way that is no longer supported")
    buffer, flags = tensor.number(slots.CONSTANT_BUFFER_IDX, "I"), tensor.number(slots.FLAGS, "I")
    external = tensor.number(slots.EXTERNAL_ID, "I")
    if flags not in (0, _INPUT, _OUTPUT) or (flags != 0) != (external != NO_VALUE) or (buffer and flags):
        raise CorruptError(f"{who} has the flags {flags}, the constant {buffer} and is external value {external}")
    if flags:
        check_index(external, externals, who, "external values")
    if buffer:
        constants.take(buffer, _size(datatype, dims), who)
    if quantised:
        _check_quantisation(content, datatype, dims, buffer, constants, who)
    return GraphValue(
        number, datatype, dims, buffer != 0, external if flags else None, flags == _INPUT, flags == _OUTPUT
    )


def _size(datatype: int, dims: Sequence[int]) -> int:
    """Return how many bytes a constant has; with four-bit elements, each row starts at a byte."""
    if BITS[datatype] >= 8:
        return math.prod(dims) * BITS[datatype] // 8
    return math.prod(dims[:-1]) * ((dims[-1] + 1) // 2) if dims else 1


def _check_quantisation(
    table: Table, datatype: int, dims: Sequence[int], buffer: int, constants: _Constants, who: str
) -> None:
    """Check that there are as many scales as channels or groups of elements."""
    slots = XNNQuantizedTensorValue
    kind, content = table.number(slots.QUANT_PARAMS_TYPE, "B"), table.table(slots.QUANT_PARAMS)
    if kind not in set(XNNQuantParams) or content is None:
        raise CorruptError(f"{who} is quantised in the unknown way {kind}, or has no parameters for it")
    if kind == XNNQuantParams.PER_TENSOR_QUANT:
        return
    if kind == XNNQuantParams.PER_TOKEN_DYNAMIC_QUANT:
        inner = content.number(PerTokenDynamicQuant.NUM_NONBATCH_DIMS, "i")
        if buffer or not 0 < inner <= len(dims):
            raise CorruptError(f"{who} is quantised by {inner} of {len(dims)} dimensions, or constant")
        return
    if kind == XNNQuantParams.PER_CHANNEL_QUANT:
        channel = content.number(PerChannelQuant.CHANNEL_DIM, "i")
        check_index(channel, len(dims), who, "dimensions")
        _check_scales(content, _OF_CHANNELS, dims[channel], 4, constants, who)
        return
    check_index(content.number(PerChannelGroupQuant.CHANNEL_DIM, "i"), len(dims), who, "dimensions")
    group = content.number(PerChannelGroupQuant.GROUP_SIZE, "i")
    if datatype != QBINT4 or len(dims) != 2 or group <= 0 or dims[1] % group:
        raise CorruptError(f"{who}, of {list(dims)} elements, is quantised in groups of {group}")
    _check_scales(content, _OF_GROUPS, dims[0] * dims[1] // group, 2, constants, who)


def _check_scales(
    table: Table, fields: tuple[int, int, int], needed: int, size: int, constants: _Constants, who: str
) -> None:
    """Check the scales of channels or groups: in the tables, or in a constant, which has `size` bytes for each."""
    scales, constant, length = fields
    index, count = table.number(constant, "I"), table.number(length, "I")
    if not table.has(scales):
        raise CorruptError(f"{who} has no list of scales")
    found = count if index else table.count(scales)
    if found != needed:
        raise CorruptError(f"{who} has {found} scales, but needs {needed}")
    if index:
        constants.take(index, needed * size, f"the scales of {who}")
    else:
        table.numbers(scales, "I")


def _node(number: int, table: Table, values: Mapping[int, GraphValue]) -> Node:
    kind, content = table.number(XNode.XNODE_UNION_TYPE, "B"), table.table(XNode.XNODE_UNION)
    found = NODES.get(kind)
    if found is None or not found.fields or content is None:
        name = found.name if found is not None else kind
        raise CorruptError(f"node {number} is of type {name}, which is not supported, or has no content")
    numbers, lists = {}, {}
    for position, name in enumerate(found.fields):
        if name in LISTS:
            if not content.has(position):
                raise CorruptError(f"node {number}, {found.name}, has no list {name!r}")
            lists[name] = content.numbers(position, "I")
        elif name not in REALS:
            numbers[name] = content.number(position, "I")
    if numbers["flags"] not in found.flags:
        raise CorruptError(f"node {number}, {found.name}, has the unknown flags {numbers['flags']}")
    node = Node(number, found, numbers, lists)
    for id_ in (*node.inputs, *node.outputs):
        if id_ not in values and not (id_ == NO_VALUE and id_ == numbers.get("bias")):
            raise CorruptError(f"{node} takes or makes value {id_}, which is not there")
    return node
