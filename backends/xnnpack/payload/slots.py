"""The numbers in ExecuTorch's `backends/xnnpack/serialization/schema.fbs`, by their names there.

A union field takes two slots; the first has the member's number. The types of nodes and their fields are in `graph`.
"""

from __future__ import annotations

from enum import IntEnum

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
