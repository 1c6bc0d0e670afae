"""Views, expansions and changes of rank, in the forms that backends take: with dynamic sizes too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.graphs import measures
from exir_lowering.plugins import Doubt, Rewrite, Scope
from exir_lowering.rewrites.node_facts import calls, is_contiguous, is_float32, same_type, tensor_of

_VIEW, _EXPAND, _SOFTMAX = "aten.view_copy.default", "aten.expand_copy.default", "aten._softmax.default"
_MUL, _SQUEEZE, _UNSQUEEZE = "aten.mul.Tensor", "aten.squeeze_copy.dims", "aten.unsqueeze_copy.default"
_BROADCASTING = ("aten.add.Tensor", "aten.sub.Tensor", _MUL, "aten.div.Tensor", "aten.mul.Scalar", "aten.div.Scalar")
_GROWTH = 1 << 12  # the most elements of a constant of ones


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
        if calls(node, _EXPAND):
            kept = [*[None] * (len(given) - len(before.shape)), *map(measures.expression, before.shape)]
            sizes: Any = [-1 if measures.expression(one) == old else one for one, old in zip(after.shape, kept)]
            sizes = [given[i] if isinstance(one, torch.SymInt) else one for i, one in enumerate(sizes)]
        else:
            sizes = inferred_sizes(after.shape)
            if sizes is None:
                return _between_views(node, operand, scope)
        if all(isinstance(one, int) for one in given):
            return None
        return None if sizes == given else scope.call(graphs.operator_name(node), operand, sizes, like=node)


def inferred_sizes(shape: Sequence[Any]) -> list[int] | None:
    """Return the sizes of a view to a shape, -1 for one that is not known; None for several of them, and for 0."""
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    return None if sizes.count(-1) > 1 or 0 in sizes else sizes


def _between_views(last: Node, node: Node, scope: Scope) -> Node | None:
    """Return what is computed between a view and its inverse, which is the last one, without the two."""
    steps: list[Node] = []
    while calls(node, _SOFTMAX, *_BROADCASTING) and len(node.users) == 1 and isinstance(node.args[0], Node):
        steps.insert(0, node)
        node = node.args[0]
    if not calls(node, _VIEW) or len(node.users) != 1 or not steps or not all(same_type(node, step) for step in steps):
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
    """Return a value of at most some rank that has the same elements; None if there are more."""
    value = tensor_of(node)
    if value is None or any(not isinstance(size, int) or size != 1 for size in value.shape[: len(value.shape) - rank]):
        return None
    extra = len(value.shape) - rank
    return scope.call(_SQUEEZE, node, list(range(extra))) if extra > 0 else node


class Movements(Rewrite):
    """Replaces what changes the rank by a view, and an expansion by a product with ones: more backends take those.

    The elements are the same, for infinities, NaN and -0.0 too. Of float32 only, contiguous, and with at most one size
    that is not known, but not those by which an expansion grows; these are at most 4096 in all.
    """

    name = "movements"
    operators = (_EXPAND, _SQUEEZE, _UNSQUEEZE)
    exactness = "bits"
    when = "taken"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return the view, or the product."""
        operand, after = node.args[0], tensor_of(node)
        before = tensor_of(operand)
        if before is None or after is None or not isinstance(operand, Node):
            return None
        sizes = inferred_sizes(after.shape)
        if not is_float32(operand, node) or not is_contiguous(operand) or not is_contiguous(node):
            return None
        if not calls(node, _EXPAND):
            return None if sizes is None else scope.call(_VIEW, operand, sizes, like=node)
        old = [*[1] * (len(after.shape) - len(before.shape)), *before.shape]
        pairs = list(zip(after.shape, old, strict=True))
        grown = [1 if measures.same_sizes([new], [was]) else new for new, was in pairs]
        if not all(isinstance(one, int) for one in grown) or not 1 < math.prod(grown) <= _GROWTH:
            return None
        if len(after.shape) > len(before.shape):
            shape = inferred_sizes(old)
            if shape is None:
                return None
            operand = scope.call(_VIEW, operand, shape)
        return scope.call(_MUL, operand, scope.constant(torch.ones(grown)), like=node)
