"""Pieces and repeats of tensors in the forms that backends take."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.graphs import measures
from exir_lowering.plugins import Doubt, Rewrite, Scope
from exir_lowering.rewrites.node_facts import calls, is_contiguous, static_shape, tensor_of

_SELECT, _SLICE, _VIEW = "aten.select_copy.int", "aten.slice_copy.Tensor", "aten.view_copy.default"
_UNBIND, _SPLIT, _SPLIT_SIZES = "aten.unbind_copy.int", "aten.split_copy.Tensor", "aten.split_with_sizes_copy.default"
_SQUEEZES = ("aten.squeeze_copy.dims", "aten.unsqueeze_copy.default")


class Pieces(Rewrite):
    """Replaces what takes one index or one piece of a tensor by slices and views, where a backend takes those only.

    `select` is a slice of one, viewed without its dimension; a result of `split`, `chunk` or `unbind` is a slice; and
    `squeeze` and `unsqueeze` are views. The same elements in the same order: all sizes have to be known, and tensors
    contiguous.
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
        operand, shape, sizes = call.args[0], static_shape(call.args[0]), static_shape(node)
        if not shape or sizes is None or 0 in shape or not is_contiguous(operand) or not is_contiguous(node):
            return None
        if calls(call, *_SQUEEZES):
            return scope.call(_VIEW, operand, [*sizes], like=node)
        dim, start, end = _piece(call, shape, 0 if call is node else node.args[1])
        if calls(call, _SPLIT, _SPLIT_SIZES):
            return scope.call(_SLICE, operand, dim, start, end, like=node)
        return scope.call(_VIEW, scope.call(_SLICE, operand, dim, start, end), [*sizes], like=node)


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


_EXPAND = "aten.expand_copy.default"
_BROADCASTING = tuple(f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div"))


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
        if (
            operands == [*node.args[:2]]
            or one is None
            or other is None
            or value is None
            or one.dtype is not other.dtype
        ):
            return None
        if not one.dim() == other.dim() == value.dim() or not all(map(is_contiguous, (*operands, node))):
            return None
        for sizes in zip(one.shape, other.shape, value.shape, strict=True):
            if not any(measures.same_sizes([size], sizes[2:]) for size in sizes[:2]):
                return None
        return scope.call(graphs.operator_name(node), *operands, like=node, **node.kwargs)
