"""Products of matrices in the forms that backends take."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from exir_lowering.plugins import Doubt, Rewrite, Scope
from exir_lowering.rewrites.node_facts import calls, is_contiguous, is_float32, same_layout, static_shape

_ADDMM, _MM, _LINEAR = "aten.addmm.default", "aten.mm.default", "aten.linear.default"
_PERMUTE, _VIEW = "aten.permute_copy.default", "aten.view_copy.default"
_BMM, _ADD = "aten.bmm.default", "aten.add.Tensor"


class Products(Rewrite):
    """Replaces `addmm` and `mm` by a linear layer or by a product of batches, where a backend takes those only.

    A linear layer whose weight is computed from constants, as the pieces of packed weights are, is decomposed before
    the weight is known: with the transposed weight it becomes one again. A product of two matrices that are computed
    becomes one of batches of one, and the bias is added. The same products are summed in another order, and the bias
    is added first or last: within rounding. Infinities, NaN and overflow are those of a sum.

    Of `addmm` only with a bias that is added as it is (`alpha` and `beta` are 1), and of float32: kernels differ in
    how they sum half precision. The number of summands has to be known and positive, as kernels differ for sums of
    nothing.
    """

    name = "products"
    operators = (_ADDMM, _MM)
    exactness = "tolerance"
    when = "taken"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return a linear layer, or the product of batches and the sum with a bias."""
        given: list[Any] = [*node.args]
        *biases, operand, matrix = given
        shape = static_shape(matrix)
        if shape is None or 0 in shape or not is_float32(operand, matrix, node):
            return None
        if not is_contiguous(operand) or not is_contiguous(node) or any(factor != 1 for factor in node.kwargs.values()):
            return None
        weight: Any = matrix.args[0] if calls(matrix, _PERMUTE) else None
        turned = weight is not None and [dim % 2 for dim in matrix.args[1]] == [1, 0] and is_contiguous(weight)
        if turned and scope.ranges.constant(weight) is not None:
            if all(static_shape(bias) == shape[1:] for bias in biases):
                return scope.call(_LINEAR, operand, weight, *biases, like=node)
            return None
        rows, sizes = static_shape(operand), static_shape(node)
        if rows is None or sizes is None or not is_contiguous(matrix):
            return None
        one, other = scope.call(_VIEW, operand, [1, *rows]), scope.call(_VIEW, matrix, [1, *shape])
        product = scope.call(_VIEW, scope.call(_BMM, one, other), [*sizes])
        total = scope.call(_ADD, product, *biases) if biases else product
        return total if same_layout(total, node) else None
