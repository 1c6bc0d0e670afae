"""What rewrites ask of nodes: which operator they call, and what is known of their shape."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch.fx import Node
from typing_extensions import TypeIs

from exir_lowering import graphs
from exir_lowering.graphs import measures
from exir_lowering.plugins import Scope

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

MOVEMENTS = (
    "aten.alias_copy.default",
    "aten.clone.default",
    "aten.expand_copy.default",
    "aten.permute_copy.default",
    "aten.select_copy.int",
    "aten.slice_copy.Tensor",
    "aten.squeeze_copy.dims",
    "aten.unsqueeze_copy.default",
    "aten.view_copy.default",
    "dim_order_ops._clone_dim_order.default",
)
"""Operators whose result has elements of their one operand, in places that do not depend on them."""


def calls(node: object, *operators: str) -> TypeIs[Node]:
    """Return whether something is a node that calls one of the given operators."""
    return isinstance(node, Node) and node.op == "call_function" and graphs.operator_name(node) in operators


def tensor_of(node: object) -> torch.Tensor | None:
    """Return what is known of a node's tensor: shape, strides and dtype; None if it is no node or has no tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def static_shape(node: object) -> tuple[int, ...] | None:
    """Return the shape of a node's tensor; None if it has none, or a size is known only when the program runs."""
    value = tensor_of(node)
    if value is None or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def view_sizes(shape: Iterable[Any]) -> list[int] | None:
    """Return the sizes of a view, -1 for one that is known only at runtime; None for several of them, and for 0."""
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    return None if sizes.count(-1) > 1 or 0 in sizes else sizes


def same_type(one: Node, other: Node) -> bool:
    """Return whether the tensors of two nodes have the same shape and dtype, whatever their sizes are."""
    first, second = tensor_of(one), tensor_of(other)
    if first is None or second is None:
        return False
    return first.dtype is second.dtype and measures.same_sizes(first.shape, second.shape)


def same_layout(one: Node, other: Node) -> bool:
    """Return whether the tensors of two nodes have the same shape, strides and dtype, whatever their sizes are."""
    return same_type(one, other) and measures.same_sizes(one.meta["val"].stride(), other.meta["val"].stride())


def is_float32(*nodes: object) -> bool:
    """Return whether nodes have tensors of float32."""
    return all((value := tensor_of(node)) is not None and value.dtype is torch.float32 for node in nodes)


def is_quantisation(node: Node) -> bool:
    """Return whether a node calls an operator of quantisation."""
    return node.op == "call_function" and graphs.operator_name(node).startswith(("quantized", "torchao"))


def pair(numbers: Any) -> list[int] | None:
    """Return two numbers, of which one may stand for both; None if they are known only at runtime."""
    given = list(numbers) if isinstance(numbers, (list, tuple)) else [numbers]
    given = given * 2 if len(given) == 1 else given
    return given if len(given) == 2 and all(isinstance(number, int) for number in given) else None


def call_again(scope: Scope, step: Node, operand: Node, *rest: Any) -> Node:
    """Add a call of a node's operator with another first operand, and other arguments behind it if some are given."""
    options: dict[str, Any] = dict(step.kwargs)
    return scope.call(graphs.operator_name(step), operand, *(rest or step.args[1:]), **options)


def is_contiguous(node: object) -> bool:
    """Return whether the elements of a node's tensor lie in memory in their order, whatever its sizes are."""
    value = tensor_of(node)
    if value is None:
        return False
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if str(stride) != str(expected) and not (isinstance(size, int) and size == 1):
            return False
        expected = expected * size
    return True


def call_key(node: Node, name: Callable[[Node], Hashable] = lambda operand: operand) -> Hashable | None:
    """Return what equal calls have in common, `name` of each operand; None for symbolic and other incomparable ones."""
    try:
        return node.target, _key(node.args, name), _key(node.kwargs, name)
    except TypeError:
        return None


def _key(argument: Any, name: Callable[[Node], Hashable]) -> Hashable:
    """Return what equal arguments have in common; TypeError if one is not one that can be compared."""
    if isinstance(argument, Node):
        return name(argument)
    if isinstance(argument, (list, tuple)):
        return tuple(_key(each, name) for each in argument)
    if isinstance(argument, dict):
        return tuple((word, _key(argument[word], name)) for word in sorted(argument))
    if isinstance(argument, _PLAIN):
        return type(argument), repr(argument)  # since 0.0 == -0.0, 1 == True, and nan is not nan
    raise TypeError(f"arguments of type {type(argument).__name__} are not compared")
