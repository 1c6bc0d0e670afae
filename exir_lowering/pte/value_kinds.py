"""The values of a method, as its file describes them: their kinds, element types, and what a tensor is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from exir_lowering.pte import slots
from exir_lowering.pte.flatbuffer import CorruptError, Table
from exir_lowering.pte.slots import KernelTypes as K

NULL, INT, BOOL, DOUBLE, TENSOR, STRING = K.NULL, K.INT, K.BOOL, K.DOUBLE, K.TENSOR, K.STRING
INT_LIST, DOUBLE_LIST, BOOL_LIST = K.INT_LIST, K.DOUBLE_LIST, K.BOOL_LIST
TENSOR_LIST, OPTIONAL_TENSOR_LIST = K.TENSOR_LIST, K.OPTIONAL_TENSOR_LIST
KINDS: Mapping[int, str] = {
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

REFUSED: Mapping[int, str] = {
    **dict.fromkeys((12, 13, 14, 16, 17), "quantised element type"),
    **dict.fromkeys(range(18, 23), "element type of bits"),
}
"""Types that ExecuTorch numbers but never writes, as quantised values are plain integers there: kernels abort."""

_DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128, torch.bool, torch.bfloat16),
    *(torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz),
    *(torch.uint16, torch.uint32, torch.uint64),
)
DTYPES: Mapping[int, torch.dtype] = dict(zip((code for code in range(30) if code not in REFUSED), _DTYPES, strict=True))
"""The element types that a tensor of a file can have, by their numbers there: see ExecuTorch's `scalar_type.fbs`."""

CODES: Mapping[torch.dtype, int] = {dtype: code for code, dtype in DTYPES.items()}
"""The numbers of element types."""


def short_name(value: object) -> str:
    """Return the name of a dtype or a layout, without that of torch."""
    return str(value).removeprefix("torch.")


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
        return f"a tensor of {short_name(self.dtype)} of shape {list(self.sizes)}{order}"


@dataclass(frozen=True, slots=True)
class Allocation:
    """Where a tensor lies in planned memory."""

    arena: int  # the number of the memory
    offset: int  # the byte where it starts there


@dataclass(frozen=True, slots=True)
class Tensor(MemoryLayout):
    """A tensor of a method."""

    dynamic: bool  # whether the shape may be smaller than `sizes`
    unbound: bool  # whether the shape may be anything
    planned: Allocation | None = None  # where it lies in planned memory
    content: memoryview | None = field(default=None, compare=False, repr=False)  # in the file; of state, the first one
    external: bool = False  # whether its content is in a data file, where it has the name of its label
    label: str | None = None  # what the model calls it, where the file says so
    greatest: tuple[int, ...] = ()  # of an input whose sizes are bounded together: the greatest of each

    @property
    def stored(self) -> bool:
        """Whether its content, or its first content, is in a file."""
        return self.external or self.content is not None

    @property
    def constant(self) -> bool:
        """Whether its content is in a file, and is not copied: it cannot be written."""
        return self.stored and self.planned is None

    def misfit(self, shape: Sequence[int], beyond: str = "more than") -> str | None:
        """Say why it cannot have a shape, None when it can; `beyond` is put before the bound of a size."""
        if len(shape) != len(self.sizes):
            return f"It has {len(shape)} dimensions, not {len(self.sizes)}."
        for dim, (size, bound) in enumerate(zip(shape, self.greatest or self.sizes, strict=True)):
            if not self.unbound and (size > bound or (size != bound and not self.dynamic)):
                return f"Its dimension {dim} is {size}, {beyond if self.dynamic else 'not'} {bound}."
        elements = math.prod(shape)
        if self.greatest and elements > math.prod(self.sizes):
            return f"It has {elements:,} elements, {beyond} {math.prod(self.sizes):,}: sizes are bounded together."
        return None


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
    for slot, what in ((of.SIZES, "shape"), (of.DIM_ORDER, "order of dimensions")):
        if not table.has(slot):
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
