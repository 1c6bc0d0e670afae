"""The numbers in ExecuTorch's schemas: fields of tables, members of unions, enum values, by their names in capitals.

Flatbuffers' rules of compatibility keep them for good. A field that is a union takes two slots, the first of which has
the member's number.
"""

from __future__ import annotations

from enum import IntEnum

ONLY = 0
"""The field of a table that has one: a value but a tensor, a `FreeCall`, a `Buffer`, a `BackendDelegateInlineData`."""

# program.fbs: `.pte` files
Program = IntEnum(
    "Program",
    "VERSION EXECUTION_PLAN CONSTANT_BUFFER BACKEND_DELEGATE_DATA SEGMENTS CONSTANT_SEGMENT MUTABLE_DATA_SEGMENTS "
    "NAMED_DATA",
    start=0,
)
ExecutionPlan = IntEnum(
    "ExecutionPlan",
    "NAME CONTAINER_META_TYPE VALUES INPUTS OUTPUTS CHAINS OPERATORS DELEGATES NON_CONST_BUFFER_SIZES "
    "NON_CONST_BUFFER_DEVICE",
    start=0,
)
ContainerMetadata = IntEnum("ContainerMetadata", "ENCODED_INP_STR ENCODED_OUT_STR", start=0)
EValue = IntEnum("EValue", "VAL_TYPE VAL", start=0)
KernelTypes = IntEnum(
    "KernelTypes",
    "NULL INT BOOL DOUBLE TENSOR STRING INT_LIST DOUBLE_LIST BOOL_LIST TENSOR_LIST OPTIONAL_TENSOR_LIST",
)
Tensor = IntEnum(
    "Tensor",
    "SCALAR_TYPE STORAGE_OFFSET SIZES DIM_ORDER REQUIRES_GRAD DATA_BUFFER_IDX ALLOCATION_INFO LAYOUT SHAPE_DYNAMISM "
    "EXTRA_TENSOR_INFO",
    start=0,
)
TensorShapeDynamism = IntEnum("TensorShapeDynamism", "STATIC DYNAMIC_BOUND DYNAMIC_UNBOUND", start=0)
ExtraTensorInfo = IntEnum(
    "ExtraTensorInfo", "MUTABLE_DATA_SEGMENTS_IDX FULLY_QUALIFIED_NAME LOCATION DEVICE_TYPE DEVICE_INDEX", start=0
)
TensorDataLocation = IntEnum("TensorDataLocation", "SEGMENT EXTERNAL", start=0)
AllocationDetails = IntEnum("AllocationDetails", "MEMORY_ID MEMORY_OFFSET_LOW MEMORY_OFFSET_HIGH", start=0)
Operator = IntEnum("Operator", "NAME OVERLOAD", start=0)
Chain = IntEnum("Chain", "INPUTS OUTPUTS INSTRUCTIONS STACKTRACE", start=0)
Instruction = IntEnum("Instruction", "INSTR_ARGS_TYPE INSTR_ARGS", start=0)
InstructionArguments = IntEnum("InstructionArguments", "KERNEL_CALL DELEGATE_CALL MOVE_CALL JUMP_FALSE_CALL FREE_CALL")
KernelCall = IntEnum("KernelCall", "OP_INDEX ARGS", start=0)
DelegateCall = IntEnum("DelegateCall", "DELEGATE_INDEX ARGS", start=0)
MoveCall = IntEnum("MoveCall", "MOVE_FROM MOVE_TO", start=0)
JumpFalseCall = IntEnum("JumpFalseCall", "COND_VALUE_INDEX DESTINATION_INSTRUCTION", start=0)
BackendDelegate = IntEnum("BackendDelegate", "ID PROCESSED COMPILE_SPECS", start=0)
BackendDelegateDataReference = IntEnum("BackendDelegateDataReference", "LOCATION INDEX", start=0)
DataLocation = IntEnum("DataLocation", "INLINE SEGMENT", start=0)
CompileSpec = IntEnum("CompileSpec", "KEY VALUE", start=0)
DataSegment = IntEnum("DataSegment", "OFFSET SIZE", start=0)
SubsegmentOffsets = IntEnum("SubsegmentOffsets", "SEGMENT_INDEX OFFSETS", start=0)
NamedData = IntEnum("NamedData", "KEY SEGMENT_INDEX", start=0)

# flat_tensor.fbs: `.ptd` files, whose segments are described as those of `.pte` files
FlatTensor = IntEnum("FlatTensor", "VERSION SEGMENTS NAMED_DATA", start=0)
FlatNamedData = IntEnum("FlatNamedData", "KEY SEGMENT_INDEX TENSOR_LAYOUT", start=0)
TensorLayout = IntEnum("TensorLayout", "SCALAR_TYPE SIZES DIM_ORDER", start=0)

# etdump_schema_flatcc.fbs: what the runtime records
ETDump = IntEnum("ETDump", "VERSION RUN_DATA", start=0)
RunData = IntEnum("RunData", "NAME BUNDLED_INPUT_INDEX ALLOCATORS EVENTS", start=0)
Event = IntEnum("Event", "PROFILE_EVENT ALLOCATION_EVENT DEBUG_EVENT", start=0)
ProfileEvent = IntEnum(
    "ProfileEvent",
    "NAME CHAIN_INDEX INSTRUCTION_ID DELEGATE_DEBUG_ID_INT DELEGATE_DEBUG_ID_STR DELEGATE_DEBUG_METADATA START_TIME "
    "END_TIME",
    start=0,
)
