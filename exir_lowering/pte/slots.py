"""The numbers in ExecuTorch's schemas: fields of tables, members of unions, enum values, by their names in capitals.

Flatbuffers' rules of compatibility keep them for good. A field that is a union takes two slots, the first of which has
the member's number.
"""
# ruff: noqa: D101

from __future__ import annotations

ONLY = 0
"""The field of a table that has one: a value but a tensor, a `FreeCall`, a `Buffer`, a `BackendDelegateInlineData`."""

# program.fbs: `.pte` files


class Program:
    VERSION, EXECUTION_PLAN, CONSTANT_BUFFER, BACKEND_DELEGATE_DATA, SEGMENTS, CONSTANT_SEGMENT = range(6)
    MUTABLE_DATA_SEGMENTS, NAMED_DATA = range(6, 8)


class ExecutionPlan:
    NAME, CONTAINER_META_TYPE, VALUES, INPUTS, OUTPUTS, CHAINS, OPERATORS, DELEGATES = range(8)
    NON_CONST_BUFFER_SIZES, NON_CONST_BUFFER_DEVICE = range(8, 10)


class ContainerMetadata:
    ENCODED_INP_STR, ENCODED_OUT_STR = range(2)


class EValue:
    VAL_TYPE, VAL = range(2)


class KernelTypes:
    NULL, INT, BOOL, DOUBLE, TENSOR, STRING, INT_LIST, DOUBLE_LIST, BOOL_LIST, TENSOR_LIST = range(1, 11)
    OPTIONAL_TENSOR_LIST = 11


class Tensor:
    SCALAR_TYPE, STORAGE_OFFSET, SIZES, DIM_ORDER, REQUIRES_GRAD, DATA_BUFFER_IDX = range(6)
    ALLOCATION_INFO, LAYOUT, SHAPE_DYNAMISM, EXTRA_TENSOR_INFO = range(6, 10)


class TensorShapeDynamism:
    STATIC, DYNAMIC_BOUND, DYNAMIC_UNBOUND = range(3)


class ExtraTensorInfo:
    MUTABLE_DATA_SEGMENTS_IDX, FULLY_QUALIFIED_NAME, LOCATION, DEVICE_TYPE, DEVICE_INDEX = range(5)


class TensorDataLocation:
    SEGMENT, EXTERNAL = range(2)


class AllocationDetails:
    MEMORY_ID, MEMORY_OFFSET_LOW, MEMORY_OFFSET_HIGH = range(3)


class Operator:
    NAME, OVERLOAD = range(2)


class Chain:
    INPUTS, OUTPUTS, INSTRUCTIONS, STACKTRACE = range(4)


class Instruction:
    INSTR_ARGS_TYPE, INSTR_ARGS = range(2)


class InstructionArguments:
    KERNEL_CALL, DELEGATE_CALL, MOVE_CALL, JUMP_FALSE_CALL, FREE_CALL = range(1, 6)


class KernelCall:
    OP_INDEX, ARGS = range(2)


class DelegateCall:
    DELEGATE_INDEX, ARGS = range(2)


class MoveCall:
    MOVE_FROM, MOVE_TO = range(2)


class JumpFalseCall:
    COND_VALUE_INDEX, DESTINATION_INSTRUCTION = range(2)


class BackendDelegate:
    ID, PROCESSED, COMPILE_SPECS = range(3)


class BackendDelegateDataReference:
    LOCATION, INDEX = range(2)


class DataLocation:
    INLINE, SEGMENT = range(2)


class CompileSpec:
    KEY, VALUE = range(2)


class DataSegment:
    OFFSET, SIZE = range(2)


class SubsegmentOffsets:
    SEGMENT_INDEX, OFFSETS = range(2)


class NamedData:
    KEY, SEGMENT_INDEX = range(2)


# flat_tensor.fbs: `.ptd` files, whose segments are described as those of `.pte` files


class FlatTensor:
    VERSION, SEGMENTS, NAMED_DATA = range(3)


class FlatNamedData:
    KEY, SEGMENT_INDEX, TENSOR_LAYOUT = range(3)


class TensorLayout:
    SCALAR_TYPE, SIZES, DIM_ORDER = range(3)


# etdump_schema_flatcc.fbs: what the runtime records


class ETDump:
    VERSION, RUN_DATA = range(2)


class RunData:
    NAME, BUNDLED_INPUT_INDEX, ALLOCATORS, EVENTS = range(4)


class Event:
    PROFILE_EVENT, ALLOCATION_EVENT, DEBUG_EVENT = range(3)


class ProfileEvent:
    NAME, CHAIN_INDEX, INSTRUCTION_ID, DELEGATE_DEBUG_ID_INT, DELEGATE_DEBUG_ID_STR = range(5)
    DELEGATE_DEBUG_METADATA, START_TIME, END_TIME = range(5, 8)
