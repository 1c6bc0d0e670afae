"""What the modules of the analysis ask of nodes, and the order in which they compute something for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.fx import Node

from exir_lowering.graphs.operators.names import target_name

Value = TypeVar("Value")

COPIES = (
    "aten.clone.default", "dim_order_ops._clone_dim_order.default", "dim_order_ops._to_dim_order_copy.default",
    "aten._to_copy.default", "aten.alias_copy.default", "aten.detach_copy.default",
)  # fmt: skip
VIEWS = (
    "aten.view_copy.default", "aten.unsqueeze_copy.default", "aten.squeeze_copy.default", "aten.squeeze_copy.dim",
    "aten.squeeze_copy.dims",
)  # fmt: skip
MOVEMENTS = (
    *COPIES, *VIEWS, "aten.expand_copy.default", "aten.permute_copy.default", "aten.slice_copy.Tensor",
    "aten.select_copy.int",
)  # fmt: skip
"""Operators whose results consist of elements of their first argument, perhaps converted."""

_MOST = float(2**48)
"""No tensor has more elements."""


def dtype_of(node: Any) -> torch.dtype | None:
    """Return the type of the elements of a node's value, None if it is no tensor or not known."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """Return the sizes of a node's value, None if it is no tensor or not known."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def name_of(node: Any) -> str:
    """Return the name of the operator that a node calls, such as "aten.add.Tensor"; "" if it calls none."""
    return target_name(node.target) if isinstance(node, Node) and node.op == "call_function" else ""


def product(sizes: Iterable[Any]) -> float:
    """Return a number that the product of some sizes does not exceed."""
    number = 1.0
    for size in sizes:
        if isinstance(size, int):
            number *= float(size)
            continue
        try:
            most = float(size.node.shape_env.bound_sympy(size.node.expr).upper)
        except (AttributeError, TypeError, ValueError, OverflowError):
            return _MOST
        number *= min(most, _MOST) if most == most else _MOST
    return min(number, _MOST)


def compute_for(
    node: Node, found: dict[Node, Value], operands: Callable[[Node], Sequence[Node]], compute: Callable[[Node], Value]
) -> Value:
    """Return what is computed for a node from `found` for its operands, each once, however deep they are."""
    stack = [node]
    while stack:
        missing = [each for each in operands(stack[-1]) if each not in found] if stack[-1] not in found else []
        if missing:
            stack += missing
            continue
        last = stack.pop()
        if last not in found:
            found[last] = compute(last)
    return found[node]
