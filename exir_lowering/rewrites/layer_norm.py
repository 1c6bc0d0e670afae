"""Layer normalisation as arithmetic, for backends that take each part of it, but not the operator."""

from __future__ import annotations

import torch
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.plugins import Doubt, Rewrite, Scope
from exir_lowering.rewrites.node_facts import calls, is_float32
from exir_lowering.rewrites.reductions import mean_of_rows

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
