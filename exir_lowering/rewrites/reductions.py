"""Means in forms that backends take: over last dimensions, those of a layer normalisation, and those of pooling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.plugins import Doubt, Rewrite, Scope
from exir_lowering.rewrites.node_facts import (
    calls,
    is_contiguous,
    is_float32,
    pair,
    same_layout,
    static_shape,
    tensor_of,
    view_sizes,
)

_MEAN, _VIEW = "aten.mean.dim", "aten.view_copy.default"
_POOLED = 4  # the rank of a tensor whose last two dimensions are pooled


class Reductions(Rewrite):
    """Replaces a mean over the last dimensions by one over the last two of four, kept as sizes of 1.

    Rows of a contiguous tensor lie one after another, so a view `[1, rows, 1, elements]` has the same ones; the
    results, one per row, are viewed as what is expected. The same elements are summed, in an order that depends on
    the kernel: within rounding. Infinities, NaN and overflow are those of a sum. Of float32 only: kernels differ in
    how they sum half precision, and others no backend takes.

    Sums stay as they are: on ARM, the host's kernel takes half the instructions, from 3x4 to 8x2048 elements.

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
        keepdim = graphs.argument(node, "keepdim") is True
        if count is None or (len(value.shape) == _POOLED and count == 2 and keepdim) or not is_contiguous(node):
            return None
        return mean_of_rows(operand, count, keepdim, scope, like=node)


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
    kept, reduced = view_sizes(value.shape[:-count]), view_sizes(value.shape[-count:])
    if kept is None or reduced is None or -1 in reduced:
        return None
    if not (len(value.shape) == _POOLED and count == 2):
        # Not [rows, 1, 1, elements]: XNNPACK takes 1.6 times as long to pool one channel as to pool many.
        operand = scope.call(_VIEW, operand, [1, -1 if -1 in kept else math.prod(kept), 1, math.prod(reduced)])
    mean = scope.call(_MEAN, operand, [-1, -2], True)
    return scope.call(_VIEW, mean, [*kept, *([1] * count if keepdim else [])], like=like)


_NORM = "aten.native_layer_norm.default"
_SUB, _MUL, _ADD = "aten.sub.Tensor", "aten.mul.Tensor", "aten.add.Tensor"


class LayerNorm(Rewrite):
    """Replaces a layer normalisation by `d * rsqrt(mean(d * d) + eps) * weight + bias`, where `d` is `x - mean(x)`.

    That is its definition. The variance is computed in two passes, which is as exact as the operator's kernels, one of
    which subtracts the square of the mean from the mean of the squares: the error is that of rounding `x`. So a row
    that is constant but for rounding becomes noise, if the noise is large compared to the root of `eps`. A row with a
    NaN or an infinity becomes NaN, as in the operator. Where the squares of a row overflow, from 1e18 on, there is no
    result to be equal to: kernels give 0 or NaN, before weight and bias, and the same kernel both, as the elements lie;
    the arithmetic gives 0, and NaN where a sum overflows.

    Of float32 only, contiguous, over last dimensions of known sizes; the mean and the deviation, which the operator
    returns too, must not be used. For the other sizes see `Reductions`.
    """

    name = "layer-norm"
    operators = ("getitem",)
    exactness = "tolerance"
    when = "taken"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return the arithmetic for the first result of a layer normalisation."""
        norm = node.args[0]
        if not calls(norm, _NORM) or node.args[1] != 0 or any(user.args[1] != 0 for user in norm.users):
            return None
        operand, dims = norm.args[:2]
        if not isinstance(operand, Node) or not isinstance(dims, (list, tuple)) or not dims:
            return None
        if not is_float32(operand, node):
            return None
        mean = mean_of_rows(operand, len(dims), True, scope)
        if mean is None:
            return None
        deviation = scope.call(_SUB, operand, mean, like=operand)
        square = scope.call(_MUL, deviation, deviation, like=operand)
        variance = mean_of_rows(square, len(dims), True, scope)
        if variance is None:
            return None
        eps = scope.constant(torch.tensor(graphs.argument(norm, "eps"), dtype=torch.float32))
        scale = scope.call("aten.rsqrt.default", scope.call(_ADD, variance, eps, like=mean), like=mean)
        normal = scope.call(_MUL, deviation, scale, like=operand)
        for operator, argument in ((_MUL, "weight"), (_ADD, "bias")):
            parameter = graphs.argument(norm, argument)
            if parameter is not None:
                normal = scope.call(operator, normal, parameter, like=operand)
        return normal


_POOL = "aten.avg_pool2d.default"


class Pooling(Rewrite):
    """Removes `ceil_mode=True` from average pooling.

    `ceil_mode` adds windows at the end that reach beyond the padded input.

    * If there are none, that is if the result has the same size without it, the same windows are averaged: the same
      bits, for every input and dtype. With a stride of 1 this holds for every size, also if it is not known.
    * If there is one window only, and it covers the whole input, the result is the mean over the last two dimensions,
      within rounding: kernels sum in another order, and infinities and NaN come out as in any sum. What a sum is
      divided by has to be the number of elements: it is with `count_include_pad=False`, without padding (what of a
      window lies beyond the padded input is not counted), and with that `divisor_override`. Only for float32 and
      float64: kernels differ in how they sum half precision, and means of integers are not defined.

    A window larger than the input is not just a question of form: kernels walk through all of it.
    """

    name = "pooling"
    operators = (_POOL,)
    exactness = "tolerance"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return a pooling without `ceil_mode`, or a mean, for one with it."""
        if not graphs.argument(node, "ceil_mode") or not isinstance(node.args[0], Node):
            return None
        axes = _axes(node)
        if axes is None:
            return None
        if all(axis.same_windows() for axis in axes):
            windows = zip(*((axis.kernel, axis.stride, axis.padding) for axis in axes), strict=True)
            counted = graphs.argument(node, "count_include_pad") is not False
            divisor = graphs.argument(node, "divisor_override")
            rest = () if divisor is None else (divisor,)  # partitioners do not know None there
            return scope.call(_POOL, node.args[0], *map(list, windows), False, counted, *rest, like=node)
        return _mean(node, axes, scope)


@dataclass(frozen=True, slots=True)
class _Axis:
    """Windows along one dimension; a size that is known only at runtime is None."""

    size: int | None
    results: int | None
    kernel: int
    stride: int
    padding: int

    def same_windows(self) -> bool:
        """Return whether the result is as long without `ceil_mode`."""
        if self.stride == 1:
            return True
        if self.size is None:
            return False
        rest = self.size + 2 * self.padding - self.kernel
        return rest >= 0 and rest // self.stride + 1 == self.results


def _axes(node: Node) -> list[_Axis] | None:
    """Return the windows along the last two dimensions."""
    value, result = tensor_of(node.args[0]), tensor_of(node)
    if value is None or result is None:
        return None
    kernel = pair(graphs.argument(node, "kernel_size"))
    stride = pair(graphs.argument(node, "stride") or kernel)
    padding = pair(graphs.argument(node, "padding") or 0)
    if kernel is None or stride is None or padding is None:
        return None
    found = zip(value.shape[-2:], result.shape[-2:], kernel, stride, padding, strict=True)
    return [_Axis(_known(size), _known(results), *window) for size, results, *window in found]


def _known(size: Any) -> int | None:
    return size if isinstance(size, int) else None


def _mean(node: Node, axes: list[_Axis], scope: Scope) -> Node | None:
    """Return the mean over everything that the one window covers."""
    value = tensor_of(node)
    if value is None or value.dtype not in (torch.float32, torch.float64):
        return None
    for axis in axes:  # one window has to cover the whole input
        if axis.results != 1 or axis.size is None or not 0 < axis.size <= axis.kernel - axis.padding:
            return None
    elements = (axes[0].size or 0) * (axes[1].size or 0)
    padded = any(axis.padding for axis in axes) and graphs.argument(node, "count_include_pad") is not False
    if (graphs.argument(node, "divisor_override") or (0 if padded else elements)) != elements:
        return None
    mean = scope.call(_MEAN, node.args[0], [-1, -2], True)
    return mean if static_shape(node) is not None and same_layout(mean, node) else None
