"""Values that are there already: what copies, and views that cancel each other, are given; what is computed twice."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.graphs.operators.purity import only_computes
from exir_lowering.graphs.sources import is_part_of_linear
from exir_lowering.plugins import Doubt, Rewrite, Scope
from exir_lowering.rewrites.node_facts import call_key, is_contiguous, is_quantisation, same_layout

_RESHAPES = ("aten.view_copy.default", "aten.squeeze_copy.dims", "aten.unsqueeze_copy.default")
"""Operators that keep the elements and their order."""

_VIEWS = (*_RESHAPES, "aten.expand_copy.default")  # operators that do if the result has as many elements

_COPIES = (
    "aten.alias_copy.default",
    "aten.clone.default",
    "aten.detach_copy.default",
    "dim_order_ops._clone_dim_order.default",
    "dim_order_ops._to_dim_order_copy.default",
)
"""Operators that copy; the last one also to another dtype."""

_SCALINGS = ("aten.mul.Scalar", "aten.div.Scalar")
"""Operators that change nothing if the number is 1, as in attention whose model has scaled the queries already."""

_COPY = "aten.copy.default"  # its result has what the second operand has

_PAD = "aten.constant_pad_nd.default"  # changes nothing if all its sizes are 0, as where models pad like TensorFlow


class Identity(Rewrite):
    """Removes copies and views whose result is their operand: same elements, shape, dtype and order in memory.

    A value that the method returns stays a separate value.
    """

    name = "identity"
    operators = (*_VIEWS, *_COPIES, *_SCALINGS, _COPY, _PAD, "aten.permute_copy.default", "aten.slice_copy.Tensor")
    exactness = "bits"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return the operand of an identity, or of a chain of permutations that cancel each other."""
        operator = graphs.operator_name(node)
        operand = node.args[operator == _COPY]
        if not isinstance(operand, Node):
            return None
        if operator == "aten.permute_copy.default":
            return _permuted(node, operand, scope)
        if operator == "aten.view_copy.default" and graphs.operator_name(operand) in _RESHAPES:
            return _view_of_view(node, operand, scope)
        if (operator in _SCALINGS and node.args[1] != 1) or (operator == _PAD and any(node.args[1])):  # type: ignore[arg-type]
            return None
        return operand if same_layout(node, operand) else None


def _order(node: Node) -> list[int]:
    """Return the dimensions of a permutation, counted from the first."""
    dims: Any = node.args[1]
    return [dim % len(dims) for dim in dims]


def _permuted(node: Node, operand: Node, scope: Scope) -> Node | None:
    """Return what a permutation, or two of them, make of their operand."""
    order = _order(node)
    if order == sorted(order):
        return operand
    if graphs.operator_name(operand) != "aten.permute_copy.default" or not isinstance(operand.args[0], Node):
        return None
    if is_part_of_linear(operand):
        return None
    first = _order(operand)
    combined = [first[dim] for dim in order]
    if combined == sorted(combined):
        return operand.args[0]
    if len(operand.users) > 1:
        return None
    return scope.call("aten.permute_copy.default", operand.args[0], combined, like=node)


def _view_of_view(node: Node, operand: Node, scope: Scope) -> Node | None:
    """Return one view in place of two; what another memory order has cannot be viewed as any shape."""
    base = operand.args[0]
    if not isinstance(base, Node) or is_part_of_linear(operand):
        return None
    if same_layout(node, base):
        return base
    if len(operand.users) > 1 or not is_contiguous(base):
        return None
    return scope.call("aten.view_copy.default", base, node.args[1], like=node)


class CommonSubexpressions(Rewrite):
    """Replaces a call by an earlier one of the same operator with the same arguments.

    Operators that are random, or not known to have no effect, are left alone; so are those of quantisation, which torch
    duplicates because a backend fuses each pattern with separate dequantised operands. As operands are rewritten first,
    equal chains become one from their beginning to their end. Source: local value numbering, Cocke and Schwartz, 1970.
    """

    name = "common-subexpressions"
    operators = ("*",)
    exactness = "bits"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return an earlier node that is equal to a node."""
        if not only_computes(node) or is_quantisation(node):
            return None
        key = call_key(node)
        if key is None:
            return None
        first: Node | None = scope.memory.get(key)
        if first is not None and scope.exists(first) and first < node:  # forms that backends take are added later
            return first if _sizes(first) == _sizes(node) else None
        scope.memory[key] = node
        return None


def _sizes(node: Node) -> str:
    """Return what sizes a result has, or is: two calls have symbols of their own for those that depend on data."""
    given = node.meta.get("val")
    values = given if isinstance(given, (list, tuple)) else [given]
    return str([list(value.shape) if isinstance(value, torch.Tensor) else value for value in values])
