"""Pieces, repeats and views of tensors in the forms that backends take."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.graphs.measures import expression
from exir_lowering.plugins import Doubt, Rewrite, Scope
from exir_lowering.rewrites.node_facts import calls, is_contiguous, same_type, static_shape, tensor_of, view_sizes

_SELECT, _SLICE, _VIEW = "aten.select_copy.int", "aten.slice_copy.Tensor", "aten.view_copy.default"
_UNBIND, _SPLIT, _SPLIT_SIZES = "aten.unbind_copy.int", "aten.split_copy.Tensor", "aten.split_with_sizes_copy.default"
_CAT, _SQUEEZES = "aten.cat.default", ("aten.squeeze_copy.dims", "aten.unsqueeze_copy.default")


class Pieces(Rewrite):
    """Replaces what takes one index or one piece of a tensor by slices and views, where a backend takes those only.

    `select` is a slice of one, viewed without its dimension; a result of `split`, `chunk` or `unbind` is a slice, of
    the one operand of a concatenation that has all of it; `squeeze` and `unsqueeze` are views. The same elements in
    the same order: tensors have to be contiguous, and all sizes known, for a view all but one.
    """

    name = "pieces"
    operators = (_SELECT, "getitem", *_SQUEEZES)
    exactness = "bits"
    when = "taken"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return the slice or the view."""
        call: Any = node.args[0] if graphs.is_getitem(node) else node
        if not calls(call, _SELECT, _UNBIND, _SPLIT, _SPLIT_SIZES, *_SQUEEZES):
            return None
        operand, sizes = call.args[0], view_sizes(node.meta["val"].shape)
        if sizes is None or not is_contiguous(operand) or not is_contiguous(node):
            return None
        if calls(call, *_SQUEEZES):
            return scope.call(_VIEW, operand, sizes, like=node)
        shape = static_shape(operand)
        if not shape or -1 in sizes or 0 in shape:
            return None
        dim, *piece = _piece(call, shape, 0 if call is node else node.args[1])
        operand, start, end = _within(operand, dim, *piece)
        if calls(call, _SPLIT, _SPLIT_SIZES):
            return scope.call(_SLICE, operand, dim, start, end, like=node)
        return scope.call(_VIEW, scope.call(_SLICE, operand, dim, start, end), sizes, like=node)


def _piece(call: Node, shape: Sequence[int], number: Any) -> tuple[int, int, int]:
    """Return the dimension of a piece, its first index, and the one behind its last."""
    dim: Any = graphs.argument(call, "dim") or 0
    dim, size = dim % len(shape), shape[dim % len(shape)]
    if calls(call, _SELECT, _UNBIND):
        index: Any = graphs.argument(call, "index") if calls(call, _SELECT) else number
        return dim, index % size, index % size + 1
    given: Any = call.args[1]
    ends = [*itertools.accumulate(given)] if isinstance(given, (list, tuple)) else [*range(given, size + given, given)]
    return dim, (0, *ends)[number], min(ends[number], size)


def _within(whole: Any, dim: int, start: int, end: int) -> tuple[Node, int, int]:
    """Return what to take a piece of, a tensor or the operand of a concatenation that has all of it, and where."""
    operands: Any = whole.args[0] if calls(whole, _CAT) else ()
    known = operands and all(static_shape(one) and is_contiguous(one) for one in operands)
    alike = len({(one.meta["val"].dtype, one.meta["val"].dim()) for one in (whole, *operands)}) == 1
    if known and alike and (graphs.argument(whole, "dim") or 0) % whole.meta["val"].dim() == dim:
        behind = 0
        for one in operands:
            first, behind = behind, behind + one.meta["val"].shape[dim]
            if first <= start and end <= behind:
                return _within(one, dim, start - first, end - first)
    return whole, start, end


_EXPAND = "aten.expand_copy.default"
_BROADCASTING = tuple(f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div"))
_ARITHMETIC, _SOFTMAX = (*_BROADCASTING, "aten.mul.Scalar", "aten.div.Scalar"), "aten._softmax.default"


class Broadcasts(Rewrite):
    """Removes expansions that an arithmetic operator does itself, as that of a norm by which a vector is divided.

    Without them, one of the operands still has each size of the result, and both are of one dtype and as many
    dimensions: operators broadcast, so each element is computed of the same two.
    """

    name = "broadcasts"
    operators = _BROADCASTING
    exactness = "bits"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return the operator without the expansions."""
        operands: list[Any] = [one.args[0] if calls(one, _EXPAND) else one for one in node.args[:2]]
        one, other, value = *map(tensor_of, operands), tensor_of(node)
        if operands == [*node.args[:2]] or one is None or other is None or value is None:
            return None
        alike = one.dtype is other.dtype and one.dim() == other.dim() == value.dim()
        if not alike or not all(map(is_contiguous, (*operands, node))):
            return None
        for first, second, made in zip(*(map(expression, each.shape) for each in (one, other, value)), strict=True):
            if made not in (first, second):
                return None
        return scope.call(graphs.operator_name(node), *operands, like=node, **node.kwargs)


class Repeats(Rewrite):
    """Replaces an expansion by a product with ones, where a backend takes that only: those of heads of keys and values.

    Of the same elements, -0.0 and NaN too. Of float32 only, contiguous; it grows by known sizes, at most 4096 in all.
    """

    name = "repeats"
    operators = (_EXPAND,)
    exactness = "bits"
    when = "taken"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return the product."""
        operand, before, after = node.args[0], tensor_of(node.args[0]), tensor_of(node)
        if before is None or after is None or before.dtype is not torch.float32:
            return None
        pairs = zip(after.shape, [1] * (after.dim() - before.dim()) + list(before.shape), strict=True)
        grown = [1 if expression(size) == expression(old) else size for size, old in pairs]
        known = all(isinstance(size, int) for size in grown) and is_contiguous(operand) and is_contiguous(node)
        if not known or not 1 < math.prod(grown) <= 4096:
            return None
        return scope.call("aten.mul.Tensor", operand, scope.constant(torch.ones(grown)), like=node)


class InferredSizes(Rewrite):
    """Writes -1 for a size that is computed at runtime, where it follows from the others.

    * In a view, if one size is not known, and none is 0. In an expansion, for the dimensions that stay as they are.
    * Of a view that has more such sizes, backends may take none. Attention has one that splits the scores of all heads,
      `[heads, rows, rows]`, into `[1, heads, rows, rows]`, and one that undoes that. What is between them computes each
      element, or last row, from those in the same place, and its other operands have one element for each of the split
      dimensions: so it is computed without the two views.
    """

    name = "inferred-sizes"
    operators = (_VIEW, _EXPAND)
    exactness = "bits"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return the call with numbers for sizes, or what lies between two views without them."""
        operand, given = node.args[0], list(node.args[1])  # type: ignore[arg-type]
        before, after = tensor_of(operand), tensor_of(node)
        if before is None or after is None or all(isinstance(size, int) for size in given):
            return None
        sizes: list[Any] | None = view_sizes(after.shape)
        if calls(node, _EXPAND):
            old = [None] * (after.dim() - before.dim()) + list(map(expression, before.shape))
            sizes = [-1 if expression(after.shape[dim]) == old[dim] else size for dim, size in enumerate(given)]
        elif sizes is None:
            return _between_views(node, scope)
        return None if sizes == given else scope.call(graphs.operator_name(node), operand, sizes, like=node)


def _between_views(last: Node, scope: Scope) -> Node | None:
    """Return what is computed between a view and its inverse, which is the last one, without the two."""
    steps: list[Node] = []
    node: Any = last.args[0]
    while calls(node, _SOFTMAX, *_ARITHMETIC) and len(node.users) == 1:
        steps.insert(0, node)
        node = node.args[0]
    if not steps or not calls(node, _VIEW) or len(node.users) != 1:
        return None
    current: Node = node.args[0]  # type: ignore[assignment]
    read = [one for step in steps for one in step.all_input_nodes]
    alike = same_type(current, last) and all(same_type(node, step) for step in steps)
    if not alike or not all(map(is_contiguous, (current, *steps, *read))):
        return None
    inner, shape = ([*map(expression, reversed(one.meta["val"].shape))] for one in (last, node))
    equal = [*map(operator.eq, inner, shape), False].index(False)  # how many of the last dimensions are
    for step in steps:
        other, *rest = step.args[1:]
        if calls(step, _SOFTMAX):
            if not equal or other not in (-1, len(shape) - 1):
                return None
            other = -1
        elif isinstance(other, Node):
            sizes = [*map(expression, other.meta["val"].shape)]
            split = list(range(len(sizes) - equal))
            if any(sizes[dim] != 1 for dim in split):
                return None
            other = scope.call(_SQUEEZES[0], other, split) if split else other
        current = scope.call(graphs.operator_name(step), current, other, *rest, like=last, **step.kwargs)
    return current
