"""Attention as backends take it: a plain softmax where that is proven to be equal, and no copies of keys and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.graphs import measures
from exir_lowering.plugins import Doubt, Rewrite, Scope
from exir_lowering.rewrites.node_facts import (
    MOVEMENTS,
    call_again,
    calls,
    is_contiguous,
    is_float32,
    same_layout,
    same_type,
    static_shape,
    tensor_of,
)

_FAR = -2e38
"""What is added to masked scores. With scores of at most 1e37 the sum is finite, and so far below any score that is not
masked that its exponential is exactly 0, as that of -inf."""

_ADD, _WHERE, _SOFTMAX = "aten.add.Tensor", "aten.where.self", "aten._softmax.default"


class SafeSoftmax(Rewrite):
    """Replaces the safe softmax to which ATen decomposes `scaled_dot_product_attention`.

    It is `where(all(x == -inf), 0, softmax(x))`, row by row: a softmax of a row that is entirely -inf would be NaN.

    * If no row can be entirely -inf, it is `softmax(x)`.
    * If `x` is `scores + where(mask, bias, -inf)`, with scores and a bias (often 0) that are bounded or NaN, and a mask
      that is not known ahead of time, it is `softmax(scores + where(mask, bias, -2e38)) * any(mask)`: in a row that is
      not fully masked the exponentials of masked scores are 0 in either case; a row that is, and has no NaN, is
      multiplied by 0. NaN stays. The mask may be the other way round, `where(mask, -inf, bias)`, and be viewed,
      expanded or permuted before it is added.
    * Otherwise it is left alone, and the report says what would have to hold.
    """

    name = "safe-softmax"
    operators = (_WHERE,)
    exactness = "bits"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return the plain softmax for the last node of a safe one."""
        softmax = _find_softmax(node, scope)
        if softmax is None:
            return None
        scores, dim = softmax.args[0], softmax.args[1]
        if not isinstance(scores, Node) or not isinstance(dim, int):
            return None
        doubt = scope.ranges.rows_doubt(scores, dim)
        if doubt is None:
            return softmax
        masked = _find_mask(scores, scope)
        if masked is None:
            return doubt
        unbounded = scope.ranges.bounded(masked.scores) or scope.ranges.bounded(masked.bias)
        return unbounded or _multiply_by_rows(masked, softmax, dim, scope)


@dataclass(frozen=True, slots=True)
class _Masked:
    """Scores with an additive mask: `scores + where(mask, bias, -inf)`, or with -inf where the mask is true."""

    total: Node  # the sum
    scores: Node
    choice: Node  # the `where`
    steps: tuple[Node, ...]  # what moves its elements before it is added, in order
    mask: Node  # its condition
    bias: Node  # what is added where the score counts
    shown: bool  # the value of the condition there


def _find_softmax(node: Node, scope: Scope) -> Node | None:
    """Return the softmax in `where(not any(not (x == -inf), dim), 0, softmax(x, dim))`."""
    empty, zero, softmax = node.args
    if not isinstance(zero, Node) or not calls(softmax, _SOFTMAX) or not same_type(node, softmax):
        return None
    if str(scope.ranges.uniform(zero)) != "0.0":  # not -0.0, which masked rows would keep
        return None
    for operator in ("aten.logical_not.default", "aten.any.dim", "aten.logical_not.default", "aten.eq.Scalar"):
        if not calls(empty, operator):
            return None
        if operator == "aten.any.dim" and not _same_rows(empty, softmax):
            return None
        if operator == "aten.eq.Scalar" and (empty.args[0] is not softmax.args[0] or empty.args[1] != float("-inf")):
            return None
        empty = empty.args[0]
    return softmax


def _same_rows(reduction: Node, softmax: Node) -> bool:
    """Return whether `any` keeps the dimension that it reduces, which is that of the softmax."""
    rank, dim, keep = len(softmax.meta["val"].shape), softmax.args[1], graphs.argument(reduction, "keepdim")
    return bool(rank) and keep is True and reduction.args[1] % rank == dim % rank  # type: ignore[operator]


def _find_mask(total: Node, scope: Scope) -> _Masked | None:
    """Return the parts of `scores + where(mask, bias, -inf)`, whichever is added to the other."""
    if not calls(total, _ADD) or graphs.argument(total, "alpha") not in (None, 1):
        return None
    for scores, addition in (total.args[:2], total.args[1::-1]):
        choice: Any = addition
        steps: list[Node] = []
        while calls(choice, *MOVEMENTS):
            steps.insert(0, choice)
            choice = choice.args[0]
        if not isinstance(scores, Node) or not calls(choice, _WHERE):
            continue
        mask, one, other = choice.args
        for bias, hidden, shown in ((one, other, True), (other, one, False)):
            if not (isinstance(mask, Node) and isinstance(bias, Node) and isinstance(hidden, Node)):
                continue
            if scope.ranges.uniform(hidden) == float("-inf"):
                return _Masked(total, scores, choice, tuple(steps), mask, bias, shown)
    return None


def _multiply_by_rows(masked: _Masked, softmax: Node, dim: int, scope: Scope) -> Node | None:
    """Return the softmax with a finite mask, times 0 for each row that is fully masked."""
    if not is_float32(masked.scores):
        return None
    visible = masked.mask if masked.shown else scope.call("aten.logical_not.default", masked.mask)
    finite = scope.call(_WHERE, visible, masked.bias, scope.constant(torch.tensor(_FAR)))
    if not same_type(finite, masked.choice):
        return None  # the number is one of another dtype, or -inf gave the choice its shape
    if masked.steps and not measures.same_sizes(visible.meta["val"].shape, finite.meta["val"].shape):
        return None
    for step in masked.steps:
        visible, finite = (call_again(scope, step, moved) for moved in (visible, finite))
    rows, shape = visible.meta["val"], softmax.meta["val"].shape
    width = dim % len(shape) - len(shape)
    if len(rows.shape) < -width or not measures.same_sizes([rows.shape[width]], [shape[width]]):
        return None  # the mask is broadcast along the rows
    some = scope.call("aten.any.dim", visible, width, True)
    order = list(range(len(rows.shape)))
    factor = scope.call(_CONVERT, some, dtype=torch.float32, dim_order=order)
    total = scope.call(_ADD, masked.scores, finite, like=masked.total)
    plain = scope.call(_SOFTMAX, total, *softmax.args[1:], like=softmax)
    return scope.call("aten.mul.Tensor", plain, factor, like=softmax)


_BMM, _EXPAND = "aten.bmm.default", "aten.expand_copy.default"
_CONVERT = "dim_order_ops._to_dim_order_copy.default"
_VIEW, _PERMUTE = "aten.view_copy.default", "aten.permute_copy.default"
_BY_ELEMENT = (
    "aten.mul.Tensor",
    "aten.mul.Scalar",
    "aten.div.Tensor",
    "aten.div.Scalar",
    "aten.clone.default",
    "dim_order_ops._clone_dim_order.default",
    "dim_order_ops._to_dim_order_copy.default",
)
"""Operators that compute each element from one element, if their other operand is a number or has one element."""


class RowFactors(Rewrite):
    """Replaces `bmm(softmax(x) * factor, values)`, where the factor is 0 or 1 for each row, by `bmm(...) * factor`.

    `SafeSoftmax` multiplies rows that are fully masked by 0. There are as many products then as values have columns,
    and not as there are scores. A row with a factor of 1 stays as it is; one with 0 is 0 in both forms, or NaN if a
    value is infinite or NaN: of such a row, `SafeSoftmax` makes weights that are equal, and none is 0.
    """

    name = "row-factors"
    operators = (_BMM,)
    exactness = "tolerance"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return the product, multiplied afterwards."""
        weights: Any = node.args[0]
        scaled: Any = weights.args[0] if calls(weights, _VIEW) else weights
        if not calls(scaled, "aten.mul.Tensor") or len(scaled.users) > 1 or not calls(scaled.args[0], _SOFTMAX):
            return None
        softmax: Any = scaled.args[0]
        factor: Any = scaled.args[1]
        made: Any = factor.args[0] if calls(factor, "aten.squeeze_copy.dims") else factor
        rows = factor.meta["val"].shape if calls(made, _CONVERT) and is_float32(node, factor) else ()
        if not rows or made.args[0].meta["val"].dtype is not torch.bool:
            return None
        shape = scaled.meta["val"].shape
        alike = same_layout(softmax, scaled) and measures.same_sizes(weights.meta["val"].shape[1:], shape[-2:])
        if not alike or not measures.same_sizes(rows, [*[1] * (len(rows) - 2), shape[-2], 1]):
            return None
        plain = softmax if scaled is weights else call_again(scope, weights, softmax)
        factor = scope.call("aten.squeeze_copy.dims", factor, [*range(len(rows) - 3)]) if len(rows) > 3 else factor
        return scope.call("aten.mul.Tensor", scope.call(_BMM, plain, node.args[1], like=node), factor, like=node)


class GroupedAttention(Rewrite):
    """Replaces `bmm(q, f(expand(x)))`, which repeats each matrix of `f(x)`, by `bmm` with the matrices themselves.

    Where several heads of queries share a head of keys, models repeat that `repeats` times: the matrices of the product
    are `(group, repeat)`, and the second operand is the same for all repeats. `f` may view, permute, copy, convert, and
    multiply or divide by one number. The repeats of `q`, which lie one after another, become rows of one matrix:
    `[groups * repeats, length, depth]` viewed as `[groups, repeats * length, depth]`; and so does the result.

    That is exact: each element of the result is the product of the same row and column as before. Kernels may sum it
    in another order, as they choose by the number of rows, which is a matter of rounding. It holds for every dtype,
    for infinities and NaN. All sizes have to be known, and not 0; the repeats have to be found, by following one
    dimension through the views, as the fastest part of the first dimension.
    """

    name = "grouped-attention"
    operators = (_BMM,)
    exactness = "tolerance"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return the product with matrices that are not repeated."""
        queries, repeated = node.args[:2]
        chain = _find_chain(repeated)
        shape = static_shape(queries)
        if chain is None or shape is None or not isinstance(queries, Node) or static_shape(node) is None:
            return None
        axis = _follow(chain)
        value = tensor_of(queries)
        if axis is None or axis.position != 0 or axis.inner != 1 or value is None or not value.is_contiguous():
            return None
        matrices = _repeat_nothing(chain, scope)
        if matrices is None:
            return None
        groups, (_, length, depth) = axis.outer, shape
        rows = scope.call(_VIEW, queries, [groups, axis.repeats * length, depth])
        product = scope.call(_BMM, rows, matrices)
        result = scope.call(_VIEW, product, list(static_shape(node) or ()))
        return result if same_layout(result, node) else None


@dataclass(frozen=True, slots=True)
class _Axis:
    """A dimension whose index is (outer, repeat, inner), of which nothing depends on the repeat."""

    position: int  # which dimension it is
    repeats: int  # at least 2
    outer: int = 1  # the number of indices before the repeat
    inner: int = 1  # and behind it


def _find_chain(node: object) -> list[Node] | None:
    """Return the nodes from an expansion to a node, in their order; None if there is no expansion."""
    chain: list[Node] = []
    while calls(node, _EXPAND, _VIEW, _PERMUTE, *_BY_ELEMENT):
        if 0 in (static_shape(node) or (0,)) or tensor_of(node.args[0]) is None:
            return None
        chain.append(node)
        if calls(node, _EXPAND):
            return chain[::-1]
        if not _is_of_one_tensor(node):
            return None
        node = node.args[0]
    return None


def _is_of_one_tensor(node: Node) -> bool:
    """Return whether operands behind the first have one element, and not more dimensions than it."""
    rank = len(static_shape(node.args[0]) or ())
    if sum(argument is node.args[0] for argument in node.args) > 1:
        return False
    shapes = [static_shape(other) for other in node.all_input_nodes if other is not node.args[0]]
    return all(shape is not None and math.prod(shape) == 1 and len(shape) <= rank for shape in shapes)


def _follow(chain: Sequence[Node]) -> _Axis | None:
    """Return where the repeats of an expansion are at the end of a chain."""
    axis = _expanded(chain[0])
    for node in chain[1:]:
        if axis is None:
            return None
        if calls(node, _PERMUTE):
            order: Any = node.args[1]
            axis = replace(axis, position=[dim % len(order) for dim in order].index(axis.position))
        elif calls(node, _VIEW):
            axis = _viewed(axis, static_shape(node.args[0]) or (), static_shape(node) or ())
    return axis


def _expanded(node: Node) -> _Axis | None:
    """Return the one dimension that an expansion repeats."""
    before, after = static_shape(node.args[0]), static_shape(node)
    if before is None or after is None or len(before) != len(after):
        return None
    grown = [dim for dim, sizes in enumerate(zip(before, after, strict=True)) if sizes[0] != sizes[1]]
    return _Axis(grown[0], after[grown[0]]) if len(grown) == 1 else None


def _viewed(axis: _Axis, before: Sequence[int], after: Sequence[int]) -> _Axis | None:
    """Return where repeats are after a view, if one dimension of the new shape holds them as a whole."""
    # Elements keep their order, in which a repeat covers `block` elements.
    block = axis.inner * math.prod(before[axis.position + 1 :])
    for position, size in enumerate(after):
        smallest = math.prod(after[position + 1 :])
        if smallest <= block < smallest * size:
            inner, rest = divmod(block, smallest)
            outer, split = divmod(size, inner * axis.repeats)
            return _Axis(position, axis.repeats, outer, inner) if rest == split == 0 else None
    return None


def _repeat_nothing(chain: Sequence[Node], scope: Scope) -> Node | None:
    """Return the result of a chain behind its expansion, without the repeats; None if a view of it is not possible."""
    current = chain[0].all_input_nodes[0]
    for index, node in enumerate(chain[1:], start=1):
        rest: tuple[Any, ...] = ()
        if calls(node, _VIEW):
            if not is_contiguous(current):
                return None
            axis = _follow(chain[: index + 1])
            shape = list(static_shape(node) or ())
            if axis is not None:
                shape[axis.position] = axis.outer * axis.inner
            rest = (shape,)
        current = call_again(scope, node, current, *rest)
    return current
