"""Read the graph in a payload of XNNPACK, as `executorch/backends/xnnpack/serialization/schema.fbs` lays it out."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from exir_lowering.backends.xnnpack.payload.graph import (
    BACKEND,
    BITS,
    LISTS,
    MAX_RANK,
    NO_VALUE,
    NODES,
    QBINT4,
    REALS,
    Graph,
    Node,
    Value,
)
from exir_lowering.backends.xnnpack.payload.shapes import check_nodes, infer
from exir_lowering.graphs.operators.budget import free_memory
from exir_lowering.pte.flatbuffer import CorruptError, Table, root
from exir_lowering.pte.value_kinds import check_index

_HEADER = struct.Struct("<4x4sHIIIQ")
_VERSIONS = (b"XN00", b"XN01")
_MAX_EXTERNALS = 4096
_TENSOR, _QUANTISED = 1, 2
_PER_CHANNEL, _PER_TENSOR, _PER_TOKEN, _PER_GROUP = 1, 2, 3, 4


@dataclass(frozen=True, slots=True)
class _Constants:
    """Where the constants of a payload are.

    Attributes:
        sizes: The size of each in bytes; None if it is in a file's named data.
        names: The names of those in named data.
        read: How many bytes are read of each name.
    """

    sizes: Sequence[int | None]
    names: Mapping[int, str]
    read: dict[str, int] = field(default_factory=dict)

    def take(self, index: int, size: int, who: str) -> None:
        """Record that some bytes of a constant are read."""
        check_index(index, len(self.sizes), who, "constants")
        available = self.sizes[index]
        if available is None:
            name = self.names[index]
            self.read[name] = max(self.read.get(name, 0), size)
        elif size > available:
            raise CorruptError(f"{who} reads {size} bytes of constant {index}, which has {available}")


def weights(payload: memoryview) -> Mapping[str, int]:
    """Return the keys of the named data that a payload reads, and how many bytes of each.

    Raises:
        CorruptError: The payload is damaged.
    """
    return read_graph(payload).weights


def read_graph(payload: memoryview) -> Graph:
    """Read the graph in a payload, and check everything that does not depend on its arguments.

    Args:
        payload: The payload. It is not copied, and only its tables are read.

    Raises:
        CorruptError: The payload is damaged, or has an unknown version.
    """
    try:
        return _read(payload)
    except CorruptError as error:
        raise CorruptError(f"a payload of {BACKEND!r}: {error}") from None


def _read(payload: memoryview) -> Graph:
    tables, space = _parts(payload)
    if len(tables) < 8 or bytes(tables[4:8]) not in _VERSIONS:
        raise CorruptError(f"it starts with {bytes(tables[:8])!r}, expected {_VERSIONS!r} at byte 4")
    table = root(tables)
    if not table.has(1) or not table.has(2):
        raise CorruptError("it has no nodes, or no values")
    externals = table.number(3, "I")
    if externals > _MAX_EXTERNALS:
        raise CorruptError(f"it is called with {externals} values, expected at most {_MAX_EXTERNALS}")
    constants = _constants(table, space)
    values: dict[int, Value] = {}
    for number, one in enumerate(table.tables(2)):
        value = _value(one, constants, externals)
        if value.id in values or value.id == NO_VALUE:
            raise CorruptError(f"value {number} has the number {value.id}, which another value has too")
        values[value.id] = value
    taken = [value.external for value in values.values() if value.external is not None]
    if len(set(taken)) != len(taken):
        raise CorruptError("two values stand for the same argument")
    nodes = tuple(_node(number, one, values) for number, one in enumerate(table.tables(1)))
    check_nodes(values, nodes)
    _check_shapes(values, nodes)
    return Graph(values, nodes, constants.read)


def _check_shapes(values: Mapping[int, Value], nodes: Sequence[Node]) -> None:
    """Check the declared shapes: XNNPACK allocates memory for them before it computes its own."""
    free = free_memory()
    for id_, shape in infer(values, nodes, {id_: value.dims for id_, value in values.items() if value.given}).items():
        value = values[id_]
        if math.prod(value.dims) != math.prod(shape):  # the order of the declared dimensions may differ
            raise CorruptError(
                f"value {id_} is declared with the shape {list(value.dims)}, its node makes {list(shape)}"
            )
        if free is not None and _size(value.datatype, shape) > free:
            raise CorruptError(f"value {id_} has the shape {list(shape)}, but only {free} bytes are free")


def _parts(payload: memoryview) -> tuple[memoryview, int | None]:
    """Return a payload's tables, and the size of the constants after them; None if they are in the tables."""
    if len(payload) < _HEADER.size or bytes(payload[4:8]) != b"XH00":
        return payload, None
    _, length, start, size, constants, space = _HEADER.unpack_from(payload)
    if length < _HEADER.size:
        raise CorruptError(f"its header has {length} bytes, expected {_HEADER.size}")
    end = max(start + size, constants + space)
    if end > len(payload):
        raise CorruptError(f"its header declares {end} bytes, but it has {len(payload)}")
    return payload[start : start + size], space


def _constants(table: Table, space: int | None) -> _Constants:
    if space is None:
        return _Constants([one.count(0) for one in table.tables(6)], {})
    sizes: list[int | None] = []
    names = {}
    for number, one in enumerate(table.tables(8)):
        if one.has(2):
            names[number] = one.text(2)
            sizes.append(None)
            continue
        start, size = one.number(0, "Q"), one.number(1, "Q")
        # Those without content, such as the first one, have no size.
        if number and start + size > space:
            raise CorruptError(f"constant {number} ends at byte {start + size} of {space}")
        sizes.append(size if size else max(space - start, 0))
    return _Constants(sizes, names)


def _value(table: Table, constants: _Constants, externals: int) -> Value:
    kind, content = table.number(0, "B"), table.table(1)
    if kind not in (_TENSOR, _QUANTISED) or content is None:
        raise CorruptError(f"a value has the unknown type {kind}, or no content")
    tensor = content if kind == _TENSOR else content.table(0)
    if tensor is None:
        raise CorruptError("a quantised value has no tensor")
    datatype, dims, number = tensor.number(0, "h"), tensor.numbers(2, "I"), tensor.number(6, "I")
    who = f"value {number}"
    if datatype not in BITS:
        raise CorruptError(f"{who} has the unknown datatype {datatype}")
    if tensor.number(1, "I") != len(dims) or len(dims) > MAX_RANK or math.prod(dims) >= 1 << 40:
        raise CorruptError(f"{who} has {tensor.number(1, 'I')} dimensions, which are {list(dims)}")
    if tensor.number(7, "h"):
        raise CorruptError(f"{who} is quantised in a way that is not supported any more")
    buffer, external, flags = tensor.number(3, "I"), tensor.number(4, "I"), tensor.number(5, "I")
    if flags & ~3 or (flags != 0) != (external != NO_VALUE) or flags == 3 or (buffer and flags):
        raise CorruptError(f"{who} has the flags {flags}, the constant {buffer} and is external value {external}")
    if flags:
        check_index(external, externals, who, "external values")
    if buffer:
        constants.take(buffer, _size(datatype, dims), who)
    if kind == _QUANTISED:
        _check_quantisation(content, datatype, dims, buffer, constants, who)
    return Value(number, datatype, dims, buffer != 0, external if flags else None, flags == 1, flags == 2)


def _size(datatype: int, dims: Sequence[int]) -> int:
    """Return how many bytes a constant has; each row of elements of four bits starts at a byte."""
    if BITS[datatype] >= 8:
        return math.prod(dims) * BITS[datatype] // 8
    return math.prod(dims[:-1]) * ((dims[-1] + 1) // 2) if dims else 1


def _check_quantisation(
    table: Table, datatype: int, dims: Sequence[int], buffer: int, constants: _Constants, who: str
) -> None:
    """Check that there are as many scales as channels or groups of elements."""
    kind, content = table.number(1, "B"), table.table(2)
    if kind not in (_PER_CHANNEL, _PER_TENSOR, _PER_TOKEN, _PER_GROUP) or content is None:
        raise CorruptError(f"{who} is quantised in the unknown way {kind}, or has no parameters for it")
    if kind == _PER_TENSOR:
        return
    if kind == _PER_TOKEN:
        if buffer or not 0 < content.number(0, "i") <= len(dims):
            raise CorruptError(f"{who} is quantised by {content.number(0, 'i')} of {len(dims)} dimensions, or constant")
        return
    channel = content.number(1, "i")
    check_index(channel, len(dims), who, "dimensions")
    if kind == _PER_CHANNEL:
        _check_scales(content, 2, dims[channel], 4, constants, who)
        return
    group = content.number(2, "i")
    if datatype != QBINT4 or len(dims) != 2 or group <= 0 or dims[1] % group:
        raise CorruptError(f"{who}, of {list(dims)} elements, is quantised in groups of {group}")
    _check_scales(content, 4, dims[0] * dims[1] // group, 2, constants, who)


def _check_scales(table: Table, first: int, needed: int, size: int, constants: _Constants, who: str) -> None:
    """Check the scales of channels: in the tables, or in a constant whose index is in the field `first`."""
    index, count = table.number(first, "I"), table.number(first + 1, "I")
    if not table.has(0):
        raise CorruptError(f"{who} has no list of scales")
    found = count if index else table.count(0)
    if found != needed:
        raise CorruptError(f"{who} has {found} scales, it needs {needed}")
    if index:
        constants.take(index, needed * size, f"the scales of {who}")
    else:
        table.numbers(0, "I")


def _node(number: int, table: Table, values: Mapping[int, Value]) -> Node:
    kind, content = table.number(0, "B"), table.table(1)
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
