"""The numbers in ExecuTorch's `backends/xnnpack/serialization/schema.fbs`, by their names there.

A union field takes two slots; the first has the member's number. The types of nodes and their fields are in `graph`.
"""

from __future__ import annotations

from typing import Final


class XNNGraph:
    """The root of a payload's tables."""

    VERSION: Final = 0
    XNODES: Final = 1
    XVALUES: Final = 2
    NUM_EXTERNS: Final = 3
    INPUT_IDS: Final = 4
    OUTPUT_IDS: Final = 5
    CONSTANT_BUFFER: Final = 6
    MEM_BUFFER_SIZES: Final = 7
    CONSTANT_DATA: Final = 8


class XNode:
    """A node."""

    XNODE_UNION_TYPE: Final = 0
    XNODE_UNION: Final = 1
    DEBUG_HANDLE: Final = 2
    OUTPUT_MIN_MAX: Final = 3


class XValue:
    """A value."""

    XVALUE_UNION_TYPE: Final = 0
    XVALUE_UNION: Final = 1


class XValueUnion:
    """What a value can be."""

    XNN_TENSOR_VALUE: Final = 1
    XNN_QUANTIZED_TENSOR_VALUE: Final = 2


class XNNTensorValue:
    """A tensor."""

    DATATYPE: Final = 0
    NUM_DIMS: Final = 1
    DIMS: Final = 2
    CONSTANT_BUFFER_IDX: Final = 3
    EXTERNAL_ID: Final = 4
    FLAGS: Final = 5
    ID_OUT: Final = 6
    DQ_DATATYPE: Final = 7


class XNNDatatype:
    """Element types of values."""

    XNN_DATATYPE_INVALID: Final = 0
    XNN_DATATYPE_FP32: Final = 1
    XNN_DATATYPE_FP16: Final = 2
    XNN_DATATYPE_QINT8: Final = 3
    XNN_DATATYPE_QUINT8: Final = 4
    XNN_DATATYPE_QINT32: Final = 5
    XNN_DATATYPE_QCINT8: Final = 6
    XNN_DATATYPE_QCINT32: Final = 7
    XNN_DATATYPE_QCINT4: Final = 8
    XNN_DATATYPE_QDINT8: Final = 9
    XNN_DATATYPE_QBINT4: Final = 10
    XNN_DATATYPE_QPINT8: Final = 11
    XNN_DATATYPE_INT32: Final = 12
    XNN_DATATYPE_PFP32: Final = 13
    XNN_DATATYPE_BF16: Final = 14


class XNNQuantizedTensorValue:
    """A quantised tensor."""

    TENSOR_VALUE: Final = 0
    QUANT_PARAMS_TYPE: Final = 1
    QUANT_PARAMS: Final = 2


class XNNQuantParams:
    """How a tensor can be quantised."""

    PER_CHANNEL_QUANT: Final = 1
    PER_TENSOR_QUANT: Final = 2
    PER_TOKEN_DYNAMIC_QUANT: Final = 3
    PER_CHANNEL_GROUP_QUANT: Final = 4


class PerChannelQuant:
    """A scale for each channel."""

    SCALE: Final = 0
    CHANNEL_DIM: Final = 1
    SCALE_BUFFER_IDX: Final = 2
    NUM_SCALES: Final = 3


class PerTokenDynamicQuant:
    """Scales that are computed when the graph is executed."""

    NUM_NONBATCH_DIMS: Final = 0


class PerChannelGroupQuant:
    """A scale for each group of the elements of a channel."""

    SCALE: Final = 0
    CHANNEL_DIM: Final = 1
    GROUP_SIZE: Final = 2
    SCALE_BF16: Final = 3
    SCALE_BUFFER_IDX: Final = 4
    NUM_SCALES: Final = 5


class Buffer:
    """A constant in the tables, as old payloads have them."""

    STORAGE: Final = 0


class ConstantDataOffset:
    """Where a constant is."""

    OFFSET: Final = 0
    SIZE: Final = 1
    NAMED_KEY: Final = 2
