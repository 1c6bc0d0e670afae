"""The values of a method, as its file describes them: their kinds, and what a tensor is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from exir_lowering.pte.dtypes import DTYPES, REFUSED
from exir_lowering.pte.flatbuffer import CorruptError, Table
from exir_lowering.pte.slots import KernelTypes

NULL, INT, BOOL, DOUBLE, TENSOR, STRING = (
    KernelTypes.NULL,
    KernelTypes.INT,
    KernelTypes.BOOL,
    KernelTypes.DOUBLE,
    KernelTypes.TENSOR,
    KernelTypes.STRING,
)
INT_LIST, DOUBLE_LIST, BOOL_LIST, TENSOR_LIST, OPTIONAL_TENSOR_LIST = (
    KernelTypes.INT_LIST,
    KernelTypes.DOUBLE_LIST,
    KernelTypes.BOOL_LIST,
    KernelTypes.TENSOR_LIST,
    KernelTypes.OPTIONAL_TENSOR_LIST,
)
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


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """The element type of a tensor, its shape, and its order in memory.

    Attributes:
        dtype: Its element type.
        sizes: Its shape.
        dim_order: Its dimensions from outer to inner, as they lie in memory.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    dim_order: tuple[int, ...]

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
    """A tensor of a method.

    Attributes:
        dynamic: Whether the shape may be smaller than `sizes`.
        unbound: Whether the shape may be anything.
        planned: Whether it lies in planned memory.
        stored: Whether its content, or its initial content, is in a file.
    """

    dynamic: bool
    unbound: bool
    planned: bool = True
    stored: bool = False

    @property
    def constant(self) -> bool:
        """Whether its content is in a file, and is not copied: it cannot be written."""
        return self.stored and not self.planned


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """A value of a method.

    Attributes:
        kind: Its member of the union, a key of `KINDS`.
        content: A `Tensor`, a number, a string or the indices in a list.
    """

    kind: int
    content: Tensor | int | float | bool | str | tuple[int, ...] | None


def check_index(index: int, size: int, who: str, what: str) -> None:
    """Check that an index is in range.

    Args:
        index: The index.
        size: How many things there are.
        who: What refers to it, for the message.
        what: What it refers to.

    Raises:
        CorruptError: It is out of range.
    """
    if not 0 <= index < size:
        raise CorruptError(f"{who} refers to number {index} of {size} {what}")


def layout(table: Table, dtype: int, sizes: int, order: int) -> MemoryLayout:
    """Read the layout of a tensor from these fields of a table; raise a CorruptError when no tensor can have it."""
    code = table.number(dtype, "b")
    if code not in DTYPES:
        raise CorruptError(f"a tensor has the {REFUSED.get(code, 'unknown element type')} {code}")
    for field, what in ((sizes, "shape"), (order, "order of dimensions")):
        if not table.has(field):
            raise CorruptError(f"a tensor has no {what}")
    shape, dimensions = table.numbers(sizes, "i"), table.numbers(order, "B")
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
