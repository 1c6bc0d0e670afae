"""Average pooling without `ceil_mode`, which few kernels know, and as a mean where one window sees everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.plugins import Doubt, Rewrite, Scope
from exir_lowering.rewrites.node_facts import pair, same_layout, static_shape, tensor_of

_POOL, _MEAN = "aten.avg_pool2d.default", "aten.mean.dim"


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

    def one_window(self) -> bool:
        """Return whether there is one window, and it covers the whole input."""
        return self.results == 1 and self.size is not None and 0 < self.size <= self.kernel - self.padding


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
    if not all(axis.one_window() for axis in axes):
        return None
    elements = (axes[0].size or 0) * (axes[1].size or 0)
    padded = any(axis.padding for axis in axes) and graphs.argument(node, "count_include_pad") is not False
    if (graphs.argument(node, "divisor_override") or (0 if padded else elements)) != elements:
        return None
    mean = scope.call(_MEAN, node.args[0], [-1, -2], True)
    return mean if static_shape(node) is not None and same_layout(mean, node) else None
