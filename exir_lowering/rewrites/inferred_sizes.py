"""Sizes that are computed at runtime, and need not be."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.graphs import measures
from exir_lowering.plugins import Doubt, Rewrite, Scope
from exir_lowering.rewrites.node_facts import calls, is_contiguous, same_type, tensor_of, view_sizes

_VIEW, _EXPAND, _SOFTMAX = "aten.view_copy.default", "aten.expand_copy.default", "aten._softmax.default"
_SQUEEZE = "aten.squeeze_copy.dims"
_ARITHMETIC = tuple(
    f"aten.{name}" for name in ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "mul.Scalar", "div.Scalar")
)


class InferredSizes(Rewrite):
    """Writes -1 for a size that is computed at runtime, where the other sizes are numbers: it follows from them.

    * In a view, if one size is not known. In an expansion, for the dimensions that stay as they are.
    * Of a view that has more such sizes, backends may take none. Attention has two of them: the view that splits the
      scores of all heads, `[heads, rows, rows]`, into `[1, heads, rows, rows]`, and the one that undoes that. What is
      between them computes each element, or each last row, from those in the same place, and operands that are added
      or multiplied have one element for each of the split dimensions: so it is computed without the two views.

    No size may be 0, of which any number would be a multiple.
    """

    name = "inferred-sizes"
    operators = (_VIEW, _EXPAND)
    exactness = "bits"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return the call with numbers for sizes, or what lies between two views without them."""
        operand, given = node.args[0], list(node.args[1])  # type: ignore[call-overload, arg-type]
        before, after = tensor_of(operand), tensor_of(node)
        if before is None or after is None or not isinstance(operand, Node):
            return None
        sizes: list[Any] | None = view_sizes(after.shape)
        if calls(node, _EXPAND):
            old = [None] * (len(given) - len(before.shape)) + list(map(measures.expression, before.shape))
            pairs = zip(given, after.shape, old, strict=True)
            sizes = [-1 if measures.expression(size) == was else one for one, size, was in pairs]
        elif sizes is None:
            return _between_views(node, operand, scope)
        if sizes == given or all(isinstance(one, int) for one in given):
            return None
        return scope.call(graphs.operator_name(node), operand, sizes, like=node)


def _between_views(last: Node, node: Node, scope: Scope) -> Node | None:
    """Return what is computed between a view and its inverse, which is the last one, without the two."""
    steps: list[Node] = []
    while calls(node, _SOFTMAX, *_ARITHMETIC) and len(node.users) == 1 and isinstance(node.args[0], Node):
        steps.insert(0, node)
        node = node.args[0]
    if not calls(node, _VIEW) or len(node.users) != 1 or not steps:
        return None
    if not all(same_type(node, step) and is_contiguous(step) for step in steps):
        return None
    base = node.args[0]
    if not isinstance(base, Node) or not same_type(base, last) or not is_contiguous(base):
        return None
    inner, shape = base.meta["val"].shape, node.meta["val"].shape
    same = 0  # how many last dimensions are the same
    while same < min(len(inner), len(shape)) and measures.same_sizes(inner[-same - 1 :], shape[-same - 1 :]):
        same += 1
    current = base
    for step in steps:
        rest = step.args[1:]
        if calls(step, _SOFTMAX):
            if not same or rest[0] not in (-1, len(shape) - 1):
                return None
            rest = (-1, *rest[1:])
        elif isinstance(rest[0], Node):
            other = _without_ones(rest[0], same, scope)
            if other is None:
                return None
            rest = (other, *rest[1:])
        current = scope.call(graphs.operator_name(step), current, *rest, like=last, **dict(step.kwargs))
    return current


def _without_ones(node: Node, rank: int, scope: Scope) -> Node | None:
    """Return a value without its first dimensions, down to some rank; None if one of them is not 1."""
    value = tensor_of(node)
    if value is None or not is_contiguous(node):
        return None
    extra = max(0, len(value.shape) - rank)
    if not measures.same_sizes(value.shape[:extra], [1] * extra):
        return None
    return scope.call(_SQUEEZE, node, list(range(extra))) if extra else node
