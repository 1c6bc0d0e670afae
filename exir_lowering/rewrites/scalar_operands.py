"""Arithmetic with a number, as arithmetic of tensors: many backends know only the latter."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.plugins import Doubt, Rewrite, Scope
from exir_lowering.rewrites.node_facts import is_contiguous, is_float32

_EXACT = 1 << 53  # up to this size, an integer is the same as a double


class ScalarOperands(Rewrite):
    """Replaces addition, subtraction and multiplication of a tensor and a number by those of two tensors.

    Of float32 only: there kernels round the number to float32 before they compute, which is what the constant holds. A
    kernel for half precision computes in float32, with the number as a float32, which a constant in half precision
    cannot hold; float64 no backend takes. The number may be infinite, NaN or -0.0; not one that is too large for
    float32, and not an integer above 2**53, as it would be rounded twice. A factor (`alpha`) other than 1 would be
    rounded after it was multiplied.

    The constant has no dimensions, so it changes neither shape nor dtype; the shape need not be known, and may be
    empty. The tensor has to be contiguous: kernels want operands of one memory order, and that of the constant is the
    contiguous one. A division is left alone: some kernels multiply by the inverse of a constant.
    """

    name = "scalar-operands"
    operators = ("aten.add.Scalar", "aten.sub.Scalar", "aten.mul.Scalar")
    exactness = "bits"
    when = "taken"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return the operation with a constant."""
        if not is_float32(node.args[0], node):
            return None
        constant = _constant(node.args[1] if len(node.args) > 1 else None)
        if constant is None or graphs.argument(node, "alpha") not in (None, 1) or not is_contiguous(node.args[0]):
            return None
        operator = graphs.operator_name(node).removesuffix("Scalar") + "Tensor"
        return scope.call(operator, node.args[0], scope.constant(constant), like=node)


_POWER, _RECIPROCAL, _MUL = "aten.pow.Tensor_Scalar", "aten.reciprocal.default", "aten.mul.Tensor"
_ROOTS = {0.5: "aten.sqrt.default", -0.5: "aten.rsqrt.default"}


class Powers(Rewrite):
    """Replaces powers by the products and roots as which eager PyTorch computes them, and a reciprocal by a quotient.

    Of float32, and of exponents of 2, 3, 0.5 and -0.5: others are computed by logarithms. Whole squares, of which
    backends have an operator, are left alone.
    """

    name = "powers"
    operators = (_POWER, _RECIPROCAL)
    exactness = "bits"
    when = "taken"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return products, a root, or a quotient."""
        operand = node.args[0]
        if not is_float32(operand, node) or not is_contiguous(operand):
            return None
        if graphs.operator_name(node) == _RECIPROCAL:
            return scope.call("aten.div.Tensor", scope.constant(torch.tensor(1.0)), operand, like=node)
        exponent: Any = node.args[1]
        if exponent in _ROOTS:
            return scope.call(_ROOTS[exponent], operand, like=node)
        if exponent not in (2, 3) or (exponent == 2 and isinstance(exponent, int)):
            return None
        square = scope.call(_MUL, operand, operand, like=node)
        return square if exponent == 2 else scope.call(_MUL, square, operand, like=node)


def _constant(number: Any) -> torch.Tensor | None:
    """Return a number as a tensor of float32; None if it is none, or kernels would round it to another value."""
    if type(number) not in (int, float) or (type(number) is int and abs(number) > _EXACT):
        return None
    constant = torch.tensor(float(number), dtype=torch.float32)
    return None if math.isfinite(number) and not constant.isfinite() else constant
