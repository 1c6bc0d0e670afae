"""The memory of a method that Python runs, laid out as the file plans it.

Tensors are parts of one piece of memory for each arena, at the offsets in the file: what overlaps there overlaps here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exir_lowering.pte.value_kinds import Tensor, strides
from exir_lowering.pte.values import Storage


class DoesNotFit(Exception):
    """A tensor was to get a shape that the file has no memory for, or to be written although it is part of the file."""


@dataclass(slots=True, eq=False)
class Slot:
    """A tensor of a method, which several values may share."""

    tensor: torch.Tensor  # always the same object; its shape changes where the file says that it may
    plan: Tensor  # what the file says about it
    constant: bool = False  # whether its memory is the file's own, which nothing may write

    def reshape(self, shape: Sequence[int]) -> None:
        """Give the tensor a shape, on the memory that it has; raise DoesNotFit when the file has none for it."""
        if tuple(self.tensor.shape) == tuple(shape):
            return
        self.check(shape)
        if self.plan.unbound:
            self.tensor.resize_(tuple(shape))
        self._lay(self.tensor, shape)

    def view(self, source: Slot, shape: Sequence[int]) -> None:
        """Put the tensor, in a shape, onto the memory of another one; raise DoesNotFit for a shape against the file."""
        self.check(shape)
        self._lay(source.tensor, shape)
        self.constant = source.constant

    def check_writable(self) -> None:
        """Raise DoesNotFit when the tensor may not be written: its memory is part of the file."""
        if self.constant:
            raise DoesNotFit("a tensor whose content is part of the file would be written; the file may be damaged")

    def clear(self) -> None:
        """Make the tensor empty, so that an operator may give it a shape; not one whose shape is fixed."""
        if self.plan.dynamic and self.tensor.numel():
            self.tensor.resize_(0)

    def settle(self) -> None:
        """Lay the tensor out as the file says, in the shape that an operator gave it, or raise DoesNotFit."""
        tensor, shape = self.tensor, tuple(self.tensor.shape)
        self.check(shape)
        if self.plan.dynamic and tensor.stride() != strides(shape, self.plan.dim_order):
            content = tensor.clone()
            self._lay(tensor, shape)
            tensor.copy_(content)

    def write(self, content: torch.Tensor) -> None:
        """Give the tensor the shape and the content of another one, or raise DoesNotFit."""
        self.check_writable()
        self.reshape(content.shape)
        self.tensor.copy_(content)

    def check(self, shape: Sequence[int]) -> None:
        """Raise DoesNotFit when the tensor may not have a shape."""
        plan = self.plan
        if plan.unbound:
            return
        if plan.misfit(shape) is not None:
            raise DoesNotFit(
                f"a tensor would get the shape {list(shape)}, but the file says {'at most ' if plan.dynamic else ''}"
                f"{list(plan.sizes)}"
            )

    def _lay(self, source: torch.Tensor, shape: Sequence[int]) -> None:
        self.tensor.set_(
            source.untyped_storage(), source.storage_offset(), tuple(shape), strides(shape, self.plan.dim_order)
        )


def allocate_arenas(sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return memory of the planned sizes, all zeros; raise DoesNotFit when there is not enough."""
    return [_zeros(size, torch.uint8) for size in sizes]


def _zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.zeros(size, dtype=dtype)
    except RuntimeError as error:
        raise DoesNotFit(f"{size} elements of {dtype} do not fit into memory: {error}") from None


def make_slot(plan: Tensor, storage: Storage, memory: Sequence[torch.Tensor], named: Mapping[str, memoryview]) -> Slot:
    """Make a tensor, with its initial content; `memory` is what was planned. DoesNotFit: there is not enough."""
    shape = (0,) * len(plan.sizes) if plan.unbound else plan.sizes
    layout = strides(shape, plan.dim_order)
    planned, content = storage.planned, storage.content if storage.name is None else named[storage.name]
    if planned is not None:
        tensor = torch.empty(0, dtype=plan.dtype)
        end = planned.offset + math.prod(shape) * plan.dtype.itemsize
        # A storage of its own, that shares the memory: as_strided_copy counts from where the storage starts.
        own = memory[planned.arena].untyped_storage()[planned.offset : end]
        tensor.set_(own, 0, shape, layout)
        if content is not None:
            tensor.copy_(_content(plan, shape, layout, content))
    elif content is not None:
        return Slot(_content(plan, shape, layout, content), plan, constant=True)
    else:
        tensor = _zeros(math.prod(shape), plan.dtype).as_strided(shape, layout)
    return Slot(tensor, plan)


def _content(plan: Tensor, shape: Any, layout: Any, content: memoryview) -> torch.Tensor:
    count = math.prod(shape)
    if not count:
        return torch.empty_strided(shape, layout, dtype=plan.dtype)
    return torch.frombuffer(content, dtype=plan.dtype, count=count).as_strided(shape, layout)
