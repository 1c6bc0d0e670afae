"""The graph in an XNNPACK payload: values, nodes and constants, and the fields of each type of node.

A union field takes two slots; the first has the member's number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

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
    """
    XNN_DATATYPE_INVALID XNN_DATATYPE_FP32 XNN_DATATYPE_FP16 XNN_DATATYPE_QINT8 XNN_DATATYPE_QUINT8 XNN_DATATYPE_QINT32
    XNN_DATATYPE_QCINT8 XNN_DATATYPE_QCINT32 XNN_DATATYPE_QCINT4 XNN_DATATYPE_QDINT8 XNN_DATATYPE_QBINT4
    XNN_DATATYPE_QPINT8 XNN_DATATYPE_INT32 XNN_DATATYPE_PFP32 XNN_DATATYPE_BF16
    """,
    start=0,
)
XNNQuantizedTensorValue = IntEnum("XNNQuantizedTensorValue", "TENSOR_VALUE QUANT_PARAMS_TYPE QUANT_PARAMS", start=0)
XNNQuantParams = IntEnum(
    "XNNQuantParams", "PER_CHANNEL_QUANT PER_TENSOR_QUANT PER_TOKEN_DYNAMIC_QUANT PER_CHANNEL_GROUP_QUANT"
)
PerChannelQuant = IntEnum("PerChannelQuant", "SCALE CHANNEL_DIM SCALE_BUFFER_IDX NUM_SCALES", start=0)
PerTokenDynamicQuant = IntEnum("PerTokenDynamicQuant", "NUM_NONBATCH_DIMS", start=0)
PerChannelGroupQuant = IntEnum(
    "PerChannelGroupQuant", "SCALE CHANNEL_DIM GROUP_SIZE SCALE_BF16 SCALE_BUFFER_IDX NUM_SCALES", start=0
)
Buffer = IntEnum("Buffer", "STORAGE", start=0)
ConstantDataOffset = IntEnum("ConstantDataOffset", "OFFSET SIZE NAMED_KEY", start=0)


BACKEND = "XnnpackBackend"
NO_VALUE = 0xFFFFFFFF
MAX_RANK = 6

FP32, FP16, BF16 = XNNDatatype.XNN_DATATYPE_FP32, XNNDatatype.XNN_DATATYPE_FP16, XNNDatatype.XNN_DATATYPE_BF16
QINT8, QUINT8 = XNNDatatype.XNN_DATATYPE_QINT8, XNNDatatype.XNN_DATATYPE_QUINT8
QINT32, INT32 = XNNDatatype.XNN_DATATYPE_QINT32, XNNDatatype.XNN_DATATYPE_INT32
QBINT4 = XNNDatatype.XNN_DATATYPE_QBINT4

BITS: Mapping[int, int] = MappingProxyType(
    {
        FP32: 32,
        FP16: 16,
        QINT8: 8,
        QUINT8: 8,
        QINT32: 32,
        XNNDatatype.XNN_DATATYPE_QCINT8: 8,
        XNNDatatype.XNN_DATATYPE_QCINT32: 32,
        XNNDatatype.XNN_DATATYPE_QCINT4: 4,
        XNNDatatype.XNN_DATATYPE_QDINT8: 8,
        QBINT4: 4,
        XNNDatatype.XNN_DATATYPE_QPINT8: 8,
        INT32: 32,
        BF16: 16,
    }
)
"""The number of bits of an element."""


@dataclass(frozen=True, slots=True)
class GraphValue:
    """A value of a graph."""

    id: int  # by which nodes refer to it
    datatype: int  # of its elements
    dims: tuple[int, ...]  # its shape, in XNNPACK's order of dimensions
    constant: bool  # whether its content is in the file
    external: int | None  # its position among the values of a call; None for a value inside the graph
    given: bool  # whether it is an input of the graph
    returned: bool  # whether it is an output of the graph


@dataclass(frozen=True, slots=True)
class NodeType:
    """A type of node."""

    name: str
    fields: tuple[str, ...]  # of its table, in their order
    flags: frozenset[int]  # those that ExecuTorch writes


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a graph."""

    number: int  # its position
    type: NodeType
    numbers: Mapping[str, int]  # its fields that are numbers, values by their ids
    lists: Mapping[str, tuple[int, ...]]  # its fields that are lists

    @property
    def inputs(self) -> tuple[int, ...]:
        """The values that it takes, in the order of its fields."""
        return tuple(self.numbers[name] for name in self.type.fields if name in INPUTS)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The values that it makes."""
        return tuple(self.numbers[name] for name in self.type.fields if name in OUTPUTS)

    def __str__(self) -> str:
        return f"node {self.number}, {self.type.name}"


@dataclass(frozen=True, slots=True)
class Graph:
    """The graph in a payload."""

    values: Mapping[int, GraphValue]  # by their ids
    nodes: tuple[Node, ...]  # in the order in which they are computed
    weights: Mapping[str, int]  # how many bytes it reads of each constant in a file's named data
    misdeclared: str  # which declared shape is not what its node makes, "" if none; with dynamic sizes they are bounds


INPUTS = frozenset({"input", "input1", "input2", "input3", "input4", "input5", "filter", "bias"})
OUTPUTS = frozenset({"output", "output_value", "output_index"})
LISTS = frozenset({"perm", "before", "after", "shape", "offsets", "sizes"})
REALS = frozenset({"number"})

_TRANSPOSED, _CORNERS, _KEEP = 1, 8, 64
_ONE = ("input", "output", "flags")
_TWO = ("input1", "input2", "output", "flags")
_PADDING = ("top", "right", "bottom", "left")
_WINDOW = (
    *_PADDING,
    *("kernel_height", "kernel_width", "stride_height", "stride_width", "dilation_height", "dilation_width"),
)
_CONVOLUTION = (
    *_WINDOW,
    *("group_inputs", "group_outputs", "groups", "adjustment_height", "adjustment_width"),
    *("input1", "filter", "bias", "output", "flags"),
)
_CAT = ("axis", "input1", "input2", "input3", "input4", "output", "flags", "input5")


def _cat(count: int) -> tuple[str, ...]:
    # The fields for inputs that it does not have exist, but are not read.
    return tuple(f"-{name}" if name[:5] == "input" and int(name[5:]) > count else name for name in _CAT)


_FIELDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("Add", "Div", "Minimum", "Multiply", "Subtract", "Maximum", "PReLU", "BatchMatrixMultiply"), _TWO),
    **dict.fromkeys(("Conv2d", "DepthwiseConv2d", "ConvTranspose2d"), _CONVOLUTION),
    **dict.fromkeys(("AvgPooling2d", "MaxPooling2d"), (*_WINDOW, *_ONE)),
    **dict.fromkeys(("LeakyReLU", "ELU"), ("number", *_ONE)),
    **{f"Concatenate{count}": _cat(count) for count in range(2, 6)},
    "ArgMaxPooling2d": (*_PADDING, "kernel_height", "kernel_width", "input", "output_value", "output_index", "flags"),
    "FullyConnected": ("input1", "filter", "bias", "output", "flags"),
    "ScaledDotProductAttention": (),
    "StaticConstantPad": ("before", "after", "number", *_ONE),
    "StaticReshape": ("rank", "shape", *_ONE),
    "StaticResizeBilinear2D": ("new_height", "new_width", *_ONE),
    "StaticSlice": ("rank", "offsets", "sizes", *_ONE),
    "StaticTranspose": ("rank", "perm", *_ONE),
}
"""The fields of nodes; others have those of `_ONE`."""

_FLAGS: Mapping[str, int] = {
    **dict.fromkeys(("FullyConnected", "BatchMatrixMultiply"), _TRANSPOSED),
    **dict.fromkeys(("AvgPooling2d", "MaxPooling2d", "GlobalAvgPooling2d"), _KEEP),
    "StaticResizeBilinear2D": _CORNERS,
}
"""The flags that nodes may have."""

_NAMES = """
    Add FullyConnected Softmax Sigmoid StaticTranspose Clamp Conv2d Div StaticResizeBilinear2D StaticConstantPad
    AvgPooling2d Minimum DepthwiseConv2d MaxPooling2d Multiply Subtract Floor Convert GlobalAvgPooling2d StaticReshape
    ArgMaxPooling2d SquareRoot Ceiling Hardswish LeakyReLU Maximum Negate Square ELU Abs PReLU Concatenate2 Concatenate3
    Concatenate4 StaticSlice ScaledDotProductAttention BatchMatrixMultiply Concatenate5 ConvTranspose2d
    ReciprocalSquareRoot Log Gelu Tanh Exp Sin Copy Cos
"""
NODES: Mapping[int, NodeType] = MappingProxyType(
    {
        number: NodeType(name, _FIELDS.get(name, _ONE), frozenset({0, _FLAGS.get(name, 0)}))
        for number, name in enumerate(_NAMES.split(), 1)
    }
)
"""The types of nodes, by their numbers in the schema. ExecuTorch's runtime does not support those without fields."""
