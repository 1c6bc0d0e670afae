"""The numbers in `program.fbs`, ExecuTorch's schema of `.pte` files: fields of tables, members of unions, enum values.

Flatbuffers' rules of compatibility keep them for good. The names are the schema's, in capitals. A field that is a union
takes two slots, the first of which has the member's number.
"""

from __future__ import annotations

from typing import Final


class Program:
    """The root of a file's tables."""

    VERSION: Final = 0
    EXECUTION_PLAN: Final = 1
    CONSTANT_BUFFER: Final = 2
    BACKEND_DELEGATE_DATA: Final = 3
    SEGMENTS: Final = 4
    CONSTANT_SEGMENT: Final = 5
    MUTABLE_DATA_SEGMENTS: Final = 6
    NAMED_DATA: Final = 7


class ExecutionPlan:
    """A method."""

    NAME: Final = 0
    CONTAINER_META_TYPE: Final = 1
    VALUES: Final = 2
    INPUTS: Final = 3
    OUTPUTS: Final = 4
    CHAINS: Final = 5
    OPERATORS: Final = 6
    DELEGATES: Final = 7
    NON_CONST_BUFFER_SIZES: Final = 8
    NON_CONST_BUFFER_DEVICE: Final = 9


class ContainerMetadata:
    """How a method's inputs and outputs are nested in Python."""

    ENCODED_INP_STR: Final = 0
    ENCODED_OUT_STR: Final = 1


class EValue:
    """A value of a method."""

    VAL_TYPE: Final = 0
    VAL: Final = 1


class KernelTypes:
    """What a value can be."""

    NULL: Final = 1
    INT: Final = 2
    BOOL: Final = 3
    DOUBLE: Final = 4
    TENSOR: Final = 5
    STRING: Final = 6
    INT_LIST: Final = 7
    DOUBLE_LIST: Final = 8
    BOOL_LIST: Final = 9
    TENSOR_LIST: Final = 10
    OPTIONAL_TENSOR_LIST: Final = 11


class Int:
    """An integer."""

    INT_VAL: Final = 0


class Bool:
    """A bool."""

    BOOL_VAL: Final = 0


class Double:
    """A floating-point number."""

    DOUBLE_VAL: Final = 0


class String:
    """A string."""

    STRING_VAL: Final = 0


class IntList:
    """Integers, each of which is a value of the method."""

    ITEMS: Final = 0


class DoubleList:
    """Floating-point numbers."""

    ITEMS: Final = 0


class BoolList:
    """Bools."""

    ITEMS: Final = 0


class TensorList:
    """Tensors, each of which is a value of the method."""

    ITEMS: Final = 0


class OptionalTensorList:
    """Tensors, or -1 for None."""

    ITEMS: Final = 0


class Tensor:
    """A tensor."""

    SCALAR_TYPE: Final = 0
    STORAGE_OFFSET: Final = 1
    SIZES: Final = 2
    DIM_ORDER: Final = 3
    REQUIRES_GRAD: Final = 4
    DATA_BUFFER_IDX: Final = 5
    ALLOCATION_INFO: Final = 6
    LAYOUT: Final = 7
    SHAPE_DYNAMISM: Final = 8
    EXTRA_TENSOR_INFO: Final = 9


class TensorShapeDynamism:
    """Whether a tensor's shape is fixed."""

    STATIC: Final = 0
    DYNAMIC_BOUND: Final = 1
    DYNAMIC_UNBOUND: Final = 2


class ExtraTensorInfo:
    """What only a few tensors need."""

    MUTABLE_DATA_SEGMENTS_IDX: Final = 0
    FULLY_QUALIFIED_NAME: Final = 1
    LOCATION: Final = 2
    DEVICE_TYPE: Final = 3
    DEVICE_INDEX: Final = 4


class TensorDataLocation:
    """Where the content of a tensor is."""

    SEGMENT: Final = 0
    EXTERNAL: Final = 1


class AllocationDetails:
    """Where a tensor lies in planned memory."""

    MEMORY_ID: Final = 0
    MEMORY_OFFSET_LOW: Final = 1
    MEMORY_OFFSET_HIGH: Final = 2


class Operator:
    """An operator that a method calls."""

    NAME: Final = 0
    OVERLOAD: Final = 1


class Chain:
    """A sequence of instructions."""

    INPUTS: Final = 0
    OUTPUTS: Final = 1
    INSTRUCTIONS: Final = 2
    STACKTRACE: Final = 3


class Instruction:
    """An instruction."""

    INSTR_ARGS_TYPE: Final = 0
    INSTR_ARGS: Final = 1


class InstructionArguments:
    """What an instruction can be."""

    KERNEL_CALL: Final = 1
    DELEGATE_CALL: Final = 2
    MOVE_CALL: Final = 3
    JUMP_FALSE_CALL: Final = 4
    FREE_CALL: Final = 5


class KernelCall:
    """A call of an operator."""

    OP_INDEX: Final = 0
    ARGS: Final = 1


class DelegateCall:
    """A call of a delegate."""

    DELEGATE_INDEX: Final = 0
    ARGS: Final = 1


class MoveCall:
    """One value becomes another one."""

    MOVE_FROM: Final = 0
    MOVE_TO: Final = 1


class JumpFalseCall:
    """A jump to another instruction."""

    COND_VALUE_INDEX: Final = 0
    DESTINATION_INSTRUCTION: Final = 1


class FreeCall:
    """A tensor gives its memory back."""

    VALUE_INDEX: Final = 0


class BackendDelegate:
    """A part of a method that a backend executes."""

    ID: Final = 0
    PROCESSED: Final = 1
    COMPILE_SPECS: Final = 2


class BackendDelegateDataReference:
    """Where a payload is."""

    LOCATION: Final = 0
    INDEX: Final = 1


class DataLocation:
    """What a payload is in."""

    INLINE: Final = 0
    SEGMENT: Final = 1


class CompileSpec:
    """What a partitioner told the backend."""

    KEY: Final = 0
    VALUE: Final = 1


class Buffer:
    """A constant in the tables, as old files have them."""

    STORAGE: Final = 0


class BackendDelegateInlineData:
    """A payload in the tables."""

    DATA: Final = 0


class DataSegment:
    """A segment of the file, after the tables."""

    OFFSET: Final = 0
    SIZE: Final = 1


class SubsegmentOffsets:
    """Where constants, or initial values, start in a segment."""

    SEGMENT_INDEX: Final = 0
    OFFSETS: Final = 1


class NamedData:
    """A segment that has a name."""

    KEY: Final = 0
    SEGMENT_INDEX: Final = 1


class ScalarType:
    """Element types, those that ExecuTorch does not implement included; from `scalar_type.fbs`."""

    BYTE: Final = 0
    CHAR: Final = 1
    SHORT: Final = 2
    INT: Final = 3
    LONG: Final = 4
    HALF: Final = 5
    FLOAT: Final = 6
    DOUBLE: Final = 7
    COMPLEXHALF: Final = 8
    COMPLEXFLOAT: Final = 9
    COMPLEXDOUBLE: Final = 10
    BOOL: Final = 11
    QINT8: Final = 12
    QUINT8: Final = 13
    QINT32: Final = 14
    BFLOAT16: Final = 15
    QUINT4X2: Final = 16
    QUINT2X4: Final = 17
    BITS1X8: Final = 18
    BITS2X4: Final = 19
    BITS4X2: Final = 20
    BITS8: Final = 21
    BITS16: Final = 22
    FLOAT8E5M2: Final = 23
    FLOAT8E4M3FN: Final = 24
    FLOAT8E5M2FNUZ: Final = 25
    FLOAT8E4M3FNUZ: Final = 26
    UINT16: Final = 27
    UINT32: Final = 28
    UINT64: Final = 29
