"""Attention's safe softmax, as a plain softmax that backends take, where that is proven to be equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.graphs import measures
from exir_lowering.plugins import Doubt, Rewrite, Scope
from exir_lowering.rewrites.node_facts import MOVEMENTS, call_again, calls, is_float32, same_type

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
    visible, finite = (_move(moved, masked.steps, scope) for moved in (visible, finite))
    rows, shape = visible.meta["val"], softmax.meta["val"].shape
    width = dim % len(shape) - len(shape)
    if len(rows.shape) < -width or not measures.same_sizes([rows.shape[width]], [shape[width]]):
        return None  # the mask is broadcast along the rows
    some = scope.call("aten.any.dim", visible, width, True)
    order = list(range(len(rows.shape)))
    factor = scope.call("dim_order_ops._to_dim_order_copy.default", some, dtype=torch.float32, dim_order=order)
    total = scope.call(_ADD, masked.scores, finite, like=masked.total)
    plain = scope.call(_SOFTMAX, total, *softmax.args[1:], like=softmax)
    return scope.call("aten.mul.Tensor", plain, factor, like=softmax)


def _move(value: Node, steps: Sequence[Node], scope: Scope) -> Node:
    """Return a value after the steps that another one of its shape goes through."""
    for step in steps:
        value = call_again(scope, step, value)
    return value
