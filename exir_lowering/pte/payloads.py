"""The payloads of backends in a file: XNNPACK's are read, as `xnnpack/serialization/schema.fbs` lays them out.

XNNPACK is in every runtime of ExecuTorch. Its tables are read, not its weights: they say which weights of the file or
of its data files a payload needs, and which operators it has, for `inspect`, `check` and errors. Other payloads are for
their delegates to read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from exir_lowering.pte import xnnpack_memory
from exir_lowering.pte.container import Data
from exir_lowering.pte.flatbuffer import CorruptError, Table, root
from exir_lowering.pte.value_kinds import MemoryLayout, check_index
from exir_lowering.pte.xnnpack_memory import Node, Value

XNNPACK = "XnnpackBackend"

ORIGINALS = "reference"
"""The backend whose payloads the original graphs of partitions are, which a file may keep."""


def original_key(method: str, number: int) -> str:
    """Return the key of the named data that holds the original graph of a method's delegate, by its number."""
    return f"exir_lowering.original/{method}/{number}"


@dataclass(frozen=True, slots=True)
class PayloadOperator:
    """An operator in a payload, as its backend has it.

    Attributes:
        name: What the backend calls it.
        inputs: What it takes, each in words, such as "float32[1, 3]" or "constant float32[4, 3]".
        outputs: What it makes.
    """

    name: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PayloadContent:
    """A payload whose tables were read."""

    operators: tuple[PayloadOperator, ...]
    weights: Mapping[str, int]  # the named data of the file that it reads, and how many bytes of each
    memory: xnnpack_memory.PayloadMemory  # what its backend allocates for it


# A union field takes two slots; the first has the member's number.
XNNGraph = IntEnum(
    "XNNGraph",
    "VERSION XNODES XVALUES NUM_EXTERNS INPUT_IDS OUTPUT_IDS CONSTANT_BUFFER MEM_BUFFER_SIZES CONSTANT_DATA",
    start=0,
)
XNode = IntEnum("XNode", "XNODE_UNION_TYPE XNODE_UNION DEBUG_HANDLE OUTPUT_MIN_MAX", start=0)
XValue = IntEnum("XValue", "XVALUE_UNION_TYPE XVALUE_UNION", start=0)
XValueUnion = IntEnum("XValueUnion", "XNN_TENSOR_VALUE XNN_QUANTIZED_TENSOR_VALUE")
XNNTensorValue = IntEnum(
    "XNNTensorValue", "DATATYPE NUM_DIMS DIMS CONSTANT_BUFFER_IDX EXTERNAL_ID FLAGS ID_OUT DQ_DATATYPE", start=0
)
XNNDatatype = IntEnum(
    "XNNDatatype",
    "XNN_DATATYPE_INVALID XNN_DATATYPE_FP32 XNN_DATATYPE_FP16 XNN_DATATYPE_QINT8 XNN_DATATYPE_QUINT8 "
    "XNN_DATATYPE_QINT32 XNN_DATATYPE_QCINT8 XNN_DATATYPE_QCINT32 XNN_DATATYPE_QCINT4 XNN_DATATYPE_QDINT8 "
    "XNN_DATATYPE_QBINT4 XNN_DATATYPE_QPINT8 XNN_DATATYPE_INT32 XNN_DATATYPE_PFP32 XNN_DATATYPE_BF16",
    start=0,
)
XNNQuantizedTensorValue = IntEnum("XNNQuantizedTensorValue", "TENSOR_VALUE QUANT_PARAMS_TYPE QUANT_PARAMS", start=0)
XNNQuantParams = IntEnum(
    "XNNQuantParams", "PER_CHANNEL_QUANT PER_TENSOR_QUANT PER_TOKEN_DYNAMIC_QUANT PER_CHANNEL_GROUP_QUANT"
)
PerChannelQuant = IntEnum("PerChannelQuant", "SCALE CHANNEL_DIM SCALE_BUFFER_IDX NUM_SCALES", start=0)
PerChannelGroupQuant = IntEnum(
    "PerChannelGroupQuant", "SCALE CHANNEL_DIM GROUP_SIZE SCALE_BF16 SCALE_BUFFER_IDX NUM_SCALES", start=0
)
ConstantDataOffset = IntEnum("ConstantDataOffset", "OFFSET SIZE NAMED_KEY", start=0)

NO_VALUE = 0xFFFFFFFF
_EXTERNAL = 3  # the flags of inputs and of outputs of a payload
_BITS = (0, 32, 16, 8, 8, 32, 8, 32, 4, 8, 4, 8, 32, 32, 16)  # the number of bits of an element of each datatype

_OUTPUTS = frozenset({"output", "output_value", "output_index"})
_WINDOW = ("",) * 10
_CONVOLUTION = (*_WINDOW, *("",) * 5, "input1", "filter", "bias", "output")
_CAT = ("", "input1", "input2", "input3", "input4", "output", "", "input5")

FIELDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("Add", "Div", "Minimum", "Multiply", "Subtract", "Maximum", "PReLU", "BatchMatrixMultiply"),
        ("input1", "input2", "output"),
    ),
    **dict.fromkeys(("Conv2d", "DepthwiseConv2d", "ConvTranspose2d"), _CONVOLUTION),
    **dict.fromkeys(("AvgPooling2d", "MaxPooling2d"), (*_WINDOW, "input", "output")),
    **dict.fromkeys(("LeakyReLU", "ELU"), ("", "input", "output")),
    # The fields for inputs that it does not have exist, but are not read.
    **{f"Concatenate{n}": tuple("" if one[-1:] in "345"[n - 2 :] else one for one in _CAT) for n in range(2, 6)},
    "ArgMaxPooling2d": (*("",) * 6, "input", "output_value", "output_index"),
    "FullyConnected": ("input1", "filter", "bias", "output"),
    "ScaledDotProductAttention": (),
    **dict.fromkeys(("StaticReshape", "StaticResizeBilinear2D", "StaticTranspose"), ("", "", "input", "output")),
    **dict.fromkeys(("StaticConstantPad", "StaticSlice"), ("", "", "", "input", "output")),
}
"""The fields of nodes that are values, with "" for others; nodes that are not listed have an input and an output."""

_NAMES = """
    Add FullyConnected Softmax Sigmoid StaticTranspose Clamp Conv2d Div StaticResizeBilinear2D StaticConstantPad
    AvgPooling2d Minimum DepthwiseConv2d MaxPooling2d Multiply Subtract Floor Convert GlobalAvgPooling2d StaticReshape
    ArgMaxPooling2d SquareRoot Ceiling Hardswish LeakyReLU Maximum Negate Square ELU Abs PReLU Concatenate2 Concatenate3
    Concatenate4 StaticSlice ScaledDotProductAttention BatchMatrixMultiply Concatenate5 ConvTranspose2d
    ReciprocalSquareRoot Log Gelu Tanh Exp Sin Copy Cos
"""
NODES = dict(enumerate(_NAMES.split(), 1))
"""The types of nodes, by their numbers in the schema."""

_HEADER = struct.Struct("<4x4sHIIIQ")
_MAGIC = b"XH00"
_VERSIONS = (b"XN00", b"XN01")


def read_payload(backend: str, payload: memoryview) -> PayloadContent | None:
    """Read a payload; None for a backend whose payloads are not known, a CorruptError for a damaged one."""
    if backend != XNNPACK:
        return None
    try:
        return _read_tables(_find_tables(payload))
    except CorruptError as error:
        raise CorruptError(f"a payload of {backend!r}: {error}") from None


def find_weights(backend: str, payload: PayloadContent, data: Data, external: dict[str, MemoryLayout | int]) -> None:
    """Check the sizes of a payload's weights that are in the file, and add those that are not to `external`."""
    for name, size in payload.weights.items():
        found, need = data.named.get(name), external.get(name, 0)
        if found is not None and len(found) < size:
            raise CorruptError(f"a payload of {backend!r} reads {size} bytes of {name!r}, which has {len(found)}")
        if found is None and isinstance(need, int):
            external[name] = max(need, size)


def _read_tables(tables: memoryview) -> PayloadContent:
    if len(tables) < 8 or bytes(tables[4:8]) not in _VERSIONS:
        raise CorruptError(f"it starts with {bytes(tables[:8])!r}, expected {_VERSIONS!r} at byte 4")
    graph = root(tables)
    names = {
        number: one.text(ConstantDataOffset.NAMED_KEY)
        for number, one in enumerate(graph.tables(XNNGraph.CONSTANT_DATA))
        if one.has(ConstantDataOffset.NAMED_KEY)
    }
    count = max(graph.count(XNNGraph.CONSTANT_DATA), graph.count(XNNGraph.CONSTANT_BUFFER))
    values: dict[int, Value] = {}
    read: dict[str, int] = {}
    for number, one in enumerate(graph.tables(XNNGraph.XVALUES)):
        id_, value, taken = _read_value(number, one)
        values[id_] = value
        for constant, size in taken:
            check_index(constant, count, f"value {id_}", "constants")
            if constant in names:
                read[names[constant]] = max(read.get(names[constant], 0), size)
    nodes = [_read_node(number, one, values) for number, one in enumerate(graph.tables(XNNGraph.XNODES))]
    return PayloadContent(
        tuple(_describe(node, values) for node in nodes), read, xnnpack_memory.estimate(nodes, values)
    )


def _find_tables(payload: memoryview) -> memoryview:
    """Return the tables of a payload, without the constants that may follow."""
    if len(payload) < _HEADER.size or bytes(payload[4:8]) != _MAGIC:
        return payload
    _, _, start, size, constants, space = _HEADER.unpack_from(payload)
    if max(start + size, constants + space) > len(payload):
        raise CorruptError(f"its header says that it has more than its {len(payload)} bytes")
    return payload[start : start + size]


def _read_value(number: int, table: Table) -> tuple[int, Value, list[tuple[int, int]]]:
    """Return a value's id, the value, and the constants that it reads with how many bytes of each."""
    kind, content = table.number(XValue.XVALUE_UNION_TYPE, "B"), table.table(XValue.XVALUE_UNION)
    quantised = content if kind == XValueUnion.XNN_QUANTIZED_TENSOR_VALUE else None
    tensor = quantised.table(XNNQuantizedTensorValue.TENSOR_VALUE) if quantised is not None else content
    if tensor is None:
        raise CorruptError(f"value {number} has no content")
    slots = XNNTensorValue
    datatype, dims = tensor.number(slots.DATATYPE, "h"), tensor.numbers(slots.DIMS, "I")
    if not 0 <= datatype < len(_BITS):
        raise CorruptError(f"value {number} has the unknown datatype {datatype}")
    buffer = tensor.number(slots.CONSTANT_BUFFER_IDX, "I")
    # With four-bit elements, each row starts at a byte.
    row = ((dims[-1] if dims else 1) * _BITS[datatype] + 7) // 8
    size = math.prod(dims[:-1]) * row
    taken = [(buffer, size)] if buffer else []
    if quantised is not None:
        taken += _read_scales(quantised)
    element = XNNDatatype(datatype).name.removeprefix("XNN_DATATYPE_").lower()
    external = bool(tensor.number(slots.FLAGS, "I") & _EXTERNAL)
    value = Value(element, dims, size, constant=bool(buffer), outside=external or bool(buffer))
    return tensor.number(slots.ID_OUT, "I"), value, taken


def _read_scales(table: Table) -> Iterator[tuple[int, int]]:
    """Yield the constant with the scales of channels or groups, if there is one, and how many bytes they are."""
    kind = table.number(XNNQuantizedTensorValue.QUANT_PARAMS_TYPE, "B")
    content = table.table(XNNQuantizedTensorValue.QUANT_PARAMS)
    channels, groups = XNNQuantParams.PER_CHANNEL_QUANT, XNNQuantParams.PER_CHANNEL_GROUP_QUANT
    slots: Any = {channels: PerChannelQuant, groups: PerChannelGroupQuant}.get(kind)  # type: ignore[call-overload]
    if content is not None and slots is not None and (index := content.number(slots.SCALE_BUFFER_IDX, "I")):
        yield index, content.number(slots.NUM_SCALES, "I") * (4 if slots is PerChannelQuant else 2)


def _read_node(number: int, table: Table, values: Mapping[int, Value]) -> Node:
    kind, content = table.number(XNode.XNODE_UNION_TYPE, "B"), table.table(XNode.XNODE_UNION)
    if kind not in NODES or content is None:
        raise CorruptError(f"node {number} is of the unknown type {kind}, or has no content")
    inputs, outputs = dict[str, int](), list[int]()
    for position, name in enumerate(FIELDS.get(NODES[kind], ("input", "output"))):
        if name:
            id_ = content.number(position, "I")
            if id_ not in values and not (id_ == NO_VALUE and name == "bias"):
                raise CorruptError(f"node {number}, {NODES[kind]}, refers to value {id_}, which is not there")
            if name in _OUTPUTS:
                outputs.append(id_)
            elif id_ != NO_VALUE:
                inputs[name] = id_
    return Node(NODES[kind], inputs, tuple(outputs))


def _describe(node: Node, values: Mapping[int, Value]) -> PayloadOperator:
    inputs, outputs = (tuple(str(values[id_]) for id_ in ids) for ids in (node.inputs.values(), node.outputs))
    return PayloadOperator(node.name, inputs, outputs)
