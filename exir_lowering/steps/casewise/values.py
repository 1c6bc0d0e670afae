"""What the values of nodes are like: descriptions that can be compared, and fake tensors made from them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.fx import Node

from exir_lowering._upstream.fakes import FakeTensor, FakeTensorMode, make_fake
from exir_lowering._upstream.trees import pytree


class Uncovered(Exception):
    """What the conversion by cases does not cover; its text is the reason for the report."""


_PLAIN = (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Description:
    """Describes values and arguments by what an operator can see of them."""

    def __init__(self, *, constants: bool = False) -> None:
        """Describe nothing yet; with `constants`, fake tensors of known content are described, without that."""
        self.symbolic = False  # whether anything so far has symbolic sizes, whose symbols only one program knows
        self._constants = constants

    def value(self, value: Any) -> Hashable:
        """Describe a node's value: a plain fake tensor, a number, a list or tuple of these; else, raise Uncovered."""
        if type(value) is FakeTensor or isinstance(value, torch.nn.Parameter):
            return self._tensor(value)
        if isinstance(value, _SYMBOLS):
            self.symbolic = True
            return type(value), value.node.expr
        if isinstance(value, (list, tuple)):
            return type(value), tuple(map(self.value, value))
        if isinstance(value, _PLAIN):
            return type(value), repr(value)  # since 0.0 == -0.0, 1 == True, and nan is not nan
        raise Uncovered(f"a value of type {type(value).__name__}")

    def _tensor(self, tensor: Any) -> Hashable:
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided or tensor.is_quantized:
            raise Uncovered("a tensor that is not a plain fake tensor")
        if tensor.constant is not None and not self._constants:
            raise Uncovered("a constant whose content is known")
        shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        if not all(type(number) is int for number in (*shape, *stride, offset)):
            shape, stride = tuple(map(self._size, shape)), tuple(map(self._size, stride))  # type: ignore[assignment]
            offset = self._size(offset)
        return "tensor", tensor.dtype, tuple(shape), stride, offset, tensor.device, tensor.requires_grad

    def _size(self, size: Any) -> Any:
        if isinstance(size, torch.SymInt):
            self.symbolic = True
            return size.node.expr
        return size

    def arguments(self, value: Any, number: Callable[[Node], int]) -> Hashable:
        """Describe the arguments of a call, with nodes as numbers; Uncovered for a type not expected in a graph."""
        if isinstance(value, Node):
            return Node, number(value)
        if isinstance(value, (list, tuple)):
            return "list", tuple(self.arguments(entry, number) for entry in value)
        if isinstance(value, dict):
            return "dict", tuple((key, self.arguments(entry, number)) for key, entry in sorted(value.items()))
        if isinstance(value, _PLAIN):
            return type(value), repr(value)
        if isinstance(value, _SYMBOLS):
            raise Uncovered("a symbolic size that no node stands for")
        raise Uncovered(f"an argument of type {type(value).__name__}")


def renew(value: Any, mode: FakeTensorMode | None, *, gradients: bool = True) -> Any:
    """Return a value of its own for another node: equal fake tensors, which share nothing with the given ones.

    None as the mode stands for theirs; with `gradients`, those that require one still do.
    """
    if isinstance(value, FakeTensor):
        return make_fake(value, mode or value.fake_mode, requires_grad=gradients and value.requires_grad)
    if isinstance(value, (list, tuple)):
        return pytree.tree_map_only(torch.Tensor, lambda tensor: renew(tensor, mode, gradients=gradients), value)
    return value


_NO_PROGRAM = FakeTensorMode()
"""The mode of what a process remembers: that of a program would keep its symbols alive, and all it knows of them."""


def outlast(value: Any) -> Any:
    """Return a value that keeps nothing of its program alive.

    Raise Uncovered if it has symbols, though its operator was given none: they stand for what depends on data.
    """
    description = Description(constants=True)
    description.value(value)
    if description.symbolic:
        raise Uncovered("an operator whose result depends on data")
    return renew(value, _NO_PROGRAM)


def check_eager(target: Any, value: Any) -> None:
    """Raise Uncovered for a value that torch may conjugate or negate later, when an operator reads it."""
    for tensor in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(tensor, torch.Tensor) and tensor.dtype.is_complex:
            raise Uncovered("complex numbers")
    if target is torch.ops.aten._neg_view.default:
        raise Uncovered(f"{target}")


def require_gradients(value: Any) -> bool:
    """Return whether a tensor of a value requires a gradient."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    return isinstance(value, (list, tuple)) and any(map(require_gradients, value))
