"""Means over the last dimensions, in the form of a global average pooling, which is the one that backends take."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.plugins import Doubt, Rewrite, Scope
from exir_lowering.rewrites.node_facts import is_contiguous, is_float32, tensor_of

_MEAN, _VIEW = "aten.mean.dim", "aten.view_copy.default"
_POOLED = 4
"""The rank of a tensor whose last two dimensions are pooled."""


class Reductions(Rewrite):
    """Replaces a mean over the last dimensions by one over the last two of four, kept as sizes of 1.

    Rows of a contiguous tensor lie one after another, so a view `[1, rows, 1, elements]` has the same ones; the
    results, one per row, are viewed as what is expected. The same elements are summed, in an order that depends on
    the kernel: within rounding. Infinities, NaN and overflow are those of a sum. Of float32 only: kernels differ in
    how they sum half precision, and others no backend takes.

    At most one size may be known only at runtime, among those that are kept; the others have to be positive: a mean
    of no elements is NaN in one form only, and views of nothing are ambiguous. A mean that is already of this form is
    left alone.
    """

    name = "reductions"
    operators = (_MEAN,)
    exactness = "tolerance"
    when = "taken"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return the mean in the other form."""
        operand, value = node.args[0], tensor_of(node.args[0])
        if not isinstance(operand, Node) or value is None or graphs.argument(node, "dtype") is not None:
            return None
        count = _count(node, len(value.shape))
        if count is None or (len(value.shape) == _POOLED and count == 2 and graphs.argument(node, "keepdim")):
            return None
        keepdim = graphs.argument(node, "keepdim") is True
        return mean_of_rows(operand, count, keepdim, scope, like=node) if is_contiguous(node) else None


def _count(node: Node, rank: int) -> int | None:
    """Return how many dimensions are reduced, if they are the last ones."""
    dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else ()
    reduced = sorted(dim % rank for dim in dims if isinstance(dim, int)) if rank else []
    return len(reduced) if reduced and reduced == list(range(rank - len(reduced), rank)) else None


def mean_of_rows(operand: Node, count: int, keepdim: bool, scope: Scope, like: Node | None = None) -> Node | None:
    """Add the mean over the last `count` dimensions as a global average pooling; None if `Reductions` excludes it."""
    value = tensor_of(operand)
    if value is None or not is_float32(operand) or not is_contiguous(operand):
        return None
    kept, reduced = _sizes(value.shape[:-count]), _sizes(value.shape[-count:])
    if kept is None or reduced is None or -1 in reduced:
        return None
    if not (len(value.shape) == _POOLED and count == 2):
        # Not [rows, 1, 1, elements]: XNNPACK takes 1.6 times as long to pool one channel as to pool many.
        operand = scope.call(_VIEW, operand, [1, -1 if -1 in kept else math.prod(kept), 1, math.prod(reduced)])
    mean = scope.call(_MEAN, operand, [-1, -2], True)
    return scope.call(_VIEW, mean, [*kept, *([1] * count if keepdim else [])], like=like)


def _sizes(shape: Sequence[int]) -> list[int] | None:
    """Return sizes, -1 for one that is known only at runtime; None if a view cannot be made of them."""
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    return None if sizes.count(-1) > 1 or 0 in sizes else sizes
