"""Depthwise convolutions with large kernels, as sums of ones with kernels of at most 25 elements."""

from __future__ import annotations

import torch
from torch.fx import Node

from exir_lowering.plugins import Doubt, Rewrite, Scope
from exir_lowering.rewrites.node_facts import is_float32, pair, static_shape, tensor_of

_CONVOLUTION, _ADD = "aten.convolution.default", "aten.add.Tensor"

_ELEMENTS = 25
"""The largest kernel for which libraries such as XNNPACK have depthwise code (5x5); larger ones take code for grouped
convolutions, which is ten times slower."""


class WideDepthwise(Rewrite):
    """Splits the rows of a large constant kernel into sets, and convolves with each of them.

    A set is symmetric about the middle of the kernel, with rows at equal distances: such as rows 0, 3 and 6 of 7, then
    1 and 5, then 2 and 4. So each is a convolution with the same stride and symmetric padding: row `first` of the
    kernel meets row `i * stride - padding + first * dilation` of the input; that is what row 0 of the set meets with
    the padding `padding - first * dilation`, which must not be negative. The rest follows from the dilation, which is
    the distance. As the set ends `first` rows before the kernel's end, the result has the same size, whatever the
    input's size is. Every product of an element and a weight occurs in exactly one of the convolutions, with zeros
    from the padding in the same places.

    So the sum is the same but for the order of its terms, that is within rounding. Infinities and NaN do not depend on
    the order, nor on what the weights are; but XNNPACK fills kernels up with weights of zero, whole ones (3x5) too, for
    which it reads elements nearby: of such an infinity or NaN more elements of the result become NaN. The bias is added
    once. Of float32 only, in two dimensions, and with at least two rows in a set.
    """

    name = "wide-depthwise"
    operators = (_CONVOLUTION,)
    exactness = "tolerance"
    when = "taken"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return the sum of convolutions for a depthwise one with a large kernel."""
        operand, weight, bias, stride, padding, dilation, transposed, *rest = node.args
        shape = _large_kernel(node)
        if shape is None or transposed or not isinstance(operand, Node) or not isinstance(weight, Node):
            return None
        content = scope.ranges.constant(weight)
        padding, dilation = pair(padding), pair(dilation)
        if content is None or padding is None or dilation is None:
            return None
        sets = _split(shape[2], _ELEMENTS // shape[3])
        if min(padding[0] - rows[0] * dilation[0] for rows in sets) < 0:
            return None
        total: Node | None = None
        for rows in sets:
            kernel = _kernel(weight, content, rows, scope)
            margin = [padding[0] - rows[0] * dilation[0], padding[1]]
            apart = [dilation[0] * (rows[1] - rows[0] if len(rows) > 1 else 1), dilation[1]]
            added = bias if total is None else None
            part = scope.call(_CONVOLUTION, operand, kernel, added, stride, margin, apart, transposed, *rest, like=node)
            total = part if total is None else scope.call(_ADD, total, part, like=node)
        return total


def _large_kernel(node: Node) -> tuple[int, ...] | None:
    """Return the shape of the stored kernel of a depthwise convolution, if it is too large but its rows are not."""
    value, weight = tensor_of(node.args[0]), node.args[1]
    shape = static_shape(weight)
    if value is None or shape is None or not is_float32(node.args[0]) or len(shape) != 4 or len(value.shape) != 4:
        return None
    if not isinstance(weight, Node) or weight.op != "placeholder" or shape[1] != 1 or value.shape[1] != node.args[8]:
        return None
    return shape if shape[2] * shape[3] > _ELEMENTS and 2 * shape[3] <= _ELEMENTS else None


def _split(count: int, most: int) -> list[list[int]]:
    """Return the rows of a kernel as sets, each with at most `most` rows, symmetric and at equal distances."""
    left, sets = set(range(count)), []
    for first in range((count + 1) // 2):
        if first in left:
            last = count - 1 - first
            steps = [step for step in range(1, last - first + 1) if (last - first) % step == 0] or [1]
            found = [list(range(first, last + 1, step)) for step in steps]
            sets.append(next(rows for rows in found if len(rows) <= most and left.issuperset(rows)))
            left.difference_update(sets[-1])
    return sets


def _kernel(weight: Node, content: torch.Tensor, rows: list[int], scope: Scope) -> Node:
    """Return a constant with some rows of a kernel."""
    key = (weight, tuple(rows))
    if key not in scope.memory or not scope.exists(scope.memory[key]):
        scope.memory[key] = scope.constant(content.detach()[:, :, rows, :].contiguous())
    return scope.memory[key]  # type: ignore[no-any-return]
