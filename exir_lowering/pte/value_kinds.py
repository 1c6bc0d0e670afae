"""The values of a method, as its file describes them: their kinds, element types, and what a tensor is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from exir_lowering.pte import slots
from exir_lowering.pte.flatbuffer import CorruptError, Table
from exir_lowering.pte.slots import KernelTypes as K, ScalarType

NULL, INT, BOOL, DOUBLE, TENSOR, STRING = K.NULL, K.INT, K.BOOL, K.DOUBLE, K.TENSOR, K.STRING
INT_LIST, DOUBLE_LIST, BOOL_LIST = K.INT_LIST, K.DOUBLE_LIST, K.BOOL_LIST
TENSOR_LIST, OPTIONAL_TENSOR_LIST = K.TENSOR_LIST, K.OPTIONAL_TENSOR_LIST
KINDS = {
    NULL: "None",
    INT: "an int",
    BOOL: "a bool",
    DOUBLE: "a float",
    TENSOR: "a tensor",
    STRING: "a str",
    INT_LIST: "a list of ints",
    DOUBLE_LIST: "a list of floats",
    BOOL_LIST: "a list of bools",
    TENSOR_LIST: "a list of tensors",
    OPTIONAL_TENSOR_LIST: "a list of tensors and None",
}

MAX_RANK = 16

DTYPES: Mapping[int, torch.dtype] = MappingProxyType(
    {
        ScalarType.BYTE: torch.uint8,
        ScalarType.CHAR: torch.int8,
        ScalarType.SHORT: torch.int16,
        ScalarType.INT: torch.int32,
        ScalarType.LONG: torch.int64,
        ScalarType.HALF: torch.float16,
        ScalarType.FLOAT: torch.float32,
        ScalarType.DOUBLE: torch.float64,
        ScalarType.COMPLEXHALF: torch.complex32,
        ScalarType.COMPLEXFLOAT: torch.complex64,
        ScalarType.COMPLEXDOUBLE: torch.complex128,
        ScalarType.BOOL: torch.bool,
        ScalarType.BFLOAT16: torch.bfloat16,
        ScalarType.FLOAT8E5M2: torch.float8_e5m2,
        ScalarType.FLOAT8E4M3FN: torch.float8_e4m3fn,
        ScalarType.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
        ScalarType.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
        ScalarType.UINT16: torch.uint16,
        ScalarType.UINT32: torch.uint32,
        ScalarType.UINT64: torch.uint64,
    }
)
"""The element types that a tensor of a file can have, by their numbers there."""

CODES: Mapping[torch.dtype, int] = MappingProxyType({dtype: code for code, dtype in DTYPES.items()})
"""The numbers of element types."""

_QUANTISED = (ScalarType.QINT8, ScalarType.QUINT8, ScalarType.QINT32, ScalarType.QUINT4X2, ScalarType.QUINT2X4)
_BITS = (ScalarType.BITS1X8, ScalarType.BITS2X4, ScalarType.BITS4X2, ScalarType.BITS8, ScalarType.BITS16)
REFUSED: Mapping[int, str] = MappingProxyType(
    {
        **dict.fromkeys(_QUANTISED, "quantised element type"),
        **dict.fromkeys(_BITS, "element type of bits"),
    }
)
"""Types that ExecuTorch numbers but never writes, as quantised values are plain integers there: kernels abort."""


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """The element type of a tensor, its shape, and its order in memory."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    dim_order: tuple[int, ...]  # its dimensions from outer to inner, as they lie in memory

    @property
    def size(self) -> int:
        """How many bytes it takes."""
        return math.prod(self.sizes) * self.dtype.itemsize

    def __str__(self) -> str:
        plain = self.dim_order == tuple(range(len(self.sizes)))
        order = "" if plain else f", its dimensions in the order {list(self.dim_order)}"
        return f"a tensor of {str(self.dtype).removeprefix('torch.')} of shape {list(self.sizes)}{order}"


@dataclass(frozen=True, slots=True)
class Tensor(MemoryLayout):
    """A tensor of a method."""

    dynamic: bool  # whether the shape may be smaller than `sizes`
    unbound: bool  # whether the shape may be anything
    planned: bool = True  # whether it lies in planned memory
    stored: bool = False  # whether its content, or its initial content, is in a file

    @property
    def constant(self) -> bool:
        """Whether its content is in a file, and is not copied: it cannot be written."""
        return self.stored and not self.planned


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """A value of a method."""

    kind: int  # its member of the union, a key of `KINDS`
    content: Tensor | int | float | bool | str | tuple[int, ...] | None  # a tuple for the indices in a list


def check_index(index: int, size: int, who: str, what: str) -> None:
    """Check that an index is below a size, else raise a CorruptError, which says who refers to what."""
    if not 0 <= index < size:
        raise CorruptError(f"{who} refers to number {index} of {size} {what}")


def layout(table: Table, of: type[slots.Tensor] | type[slots.TensorLayout]) -> MemoryLayout:
    """Read the layout of a tensor from a table with these fields; raise a CorruptError when no tensor can have it."""
    code = table.number(of.SCALAR_TYPE, "b")
    if code not in DTYPES:
        raise CorruptError(f"a tensor has the {REFUSED.get(code, 'unknown element type')} {code}")
    for field, what in ((of.SIZES, "shape"), (of.DIM_ORDER, "order of dimensions")):
        if not table.has(field):
            raise CorruptError(f"a tensor has no {what}")
    shape, dimensions = table.numbers(of.SIZES, "i"), table.numbers(of.DIM_ORDER, "B")
    if len(shape) > MAX_RANK or any(size < 0 for size in shape) or sorted(dimensions) != list(range(len(shape))):
        raise CorruptError(f"a tensor has the shape {list(shape)} with the dimensions in the order {list(dimensions)}")
    return MemoryLayout(DTYPES[code], shape, dimensions)


def strides(shape: Sequence[int], dim_order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a shape whose dimensions lie in memory in an order, from outer to inner."""
    found, step = [0] * len(shape), 1
    for dim in reversed(dim_order):
        found[dim] = step
        step *= max(shape[dim], 1)
    return tuple(found)
