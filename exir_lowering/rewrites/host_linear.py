"""Products with a bias on the host, in forms for which ExecuTorch's runtime has optimised kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from exir_lowering.plugins import Doubt, Rewrite, Scope
from exir_lowering.rewrites.node_facts import calls, is_contiguous, same_layout, static_shape, tensor_of

_ADDMM, _MM, _LINEAR = "aten.addmm.default", "aten.mm.default", "aten.linear.default"
_PERMUTE, _ADD = "aten.permute_copy.default", "aten.add.Tensor"


class HostLinear(Rewrite):
    """Replaces `addmm`, and `mm` with a transposed right side, where they stay on the host.

    ExecuTorch's kernel of `addmm` is a plain loop; those of a linear layer, `mm` and `add` are optimised. So a product
    with a transposed matrix becomes a linear layer, which reads the matrix as it lies in memory, and another one with
    a bias becomes a product and a sum. The same products are summed in another order, and the bias is added first or
    last: within rounding. Infinities, NaN and overflow are those of a sum.

    Of `addmm` only with a bias that is added as it is (`alpha` and `beta` are 1), and of float32 and float64: kernels
    differ in how they sum half precision. The number of summands has to be known and positive, as they also differ
    for sums of nothing.
    """

    name = "host-linear"
    operators = (_ADDMM, _MM)
    exactness = "tolerance"
    when = "host"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return a linear layer, or the sum of a product and a bias."""
        *biases, operand, matrix = node.args
        value, shape = tensor_of(operand), static_shape(matrix)
        if value is None or shape is None or 0 in shape or not is_contiguous(operand) or not is_contiguous(node):
            return None
        if value.dtype not in (torch.float32, torch.float64) or any(factor != 1 for factor in node.kwargs.values()):
            return None
        permuted: Any = matrix.args if calls(matrix, _PERMUTE) else (None, ())
        weight, order = permuted
        turned = [dim % 2 for dim in order] == [1, 0] and is_contiguous(weight)
        if turned and all(static_shape(bias) == shape[1:] for bias in biases):
            return scope.call(_LINEAR, operand, weight, *biases, like=node)
        if not biases:
            return None
        total = scope.call(_ADD, scope.call(_MM, operand, matrix, like=node), *biases)
        return total if same_layout(total, node) else None
