"""What is divided by its own norm is bounded, whatever it is.

RMS norm divides x by sqrt(mean(x * x) + eps). Exactly, |x_i| / sqrt(sum(x * x) / n + eps) <= sqrt(n). In floating
point it holds for every x, with a little slack:

* A sum of squares never rounds to less than its largest term, as rounding is monotone and no term is negative. So
  mean >= x_i ** 2 / n up to a few units in the last place.
* Squares that underflow belong to |x_i| < sqrt(n * tiny): there the quotient is at most sqrt(n * tiny / eps).
* If a square, or the sum, overflows, the mean is inf: x_i / inf and x_i * rsqrt(inf) are 0 for finite x_i.
* If x_i is infinite, so is the mean, and inf / inf and inf * 0 are NaN. A NaN among the x makes the mean NaN.

A decomposed layer norm is the same with x - mean(x) in the place of x, and a vector divided by its norm the same with
a sum in the place of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from exir_lowering.graphs.ranges.intervals import INF, limits
from exir_lowering.graphs.ranges.nodes import COPIES, VIEWS, dtype_of, name_of, product, shape_of

_ABOVE = ("aten.add.Tensor", "aten.add.Scalar", "aten.clamp.default", "aten.maximum.default")
_POWER = "aten.pow.Tensor_Scalar"

Low = Callable[[Any], float]
"""What an operand is at least."""


def normalised(value: Any, norm: Any, low: Low, *, inverted: bool) -> float:
    """Return the largest magnitude of a value divided by its own norm, or times one by it; inf if it is another one."""
    dtype = dtype_of(value)
    if dtype is None or dtype_of(norm) is not dtype or not dtype.is_floating_point:
        return INF
    root, outer = (_strip(norm, expanded=True), 0.0) if inverted else _least(norm, low)
    exponent, operator = (-0.5, "aten.rsqrt.default") if inverted else (0.5, "aten.sqrt.default")
    if name_of(root) == operator or (name_of(root) == _POWER and root.args[1] == exponent):
        reduced, least = _least(root.args[0], low)
        if name_of(reduced) not in ("aten.mean.dim", "aten.sum.dim_IntList") or reduced.args[2:] != (True,):
            return INF
        square, dims = reduced.args[:2]
        squared = name_of(square) == _POWER and square.args[1] == 2
        if reduced.kwargs or not (squared or (name_of(square) == "aten.mul.Tensor" and len({*square.args}) == 1)):
            return INF
        source, mean = square.args[0], "mean" in name_of(reduced)
    elif not inverted and name_of(root) == "aten.linalg_vector_norm.default" and root.args[3:] == (True,):
        reduced, (source, order, dims, _), least, mean = root, root.args, 0.0, False
        if order != 2:
            return INF
    else:
        return INF
    shape, least = shape_of(source), max(least, outer**2)
    if shape is None or dtype_of(source) is not dtype_of(reduced) or _strip(source) is not _strip(value) or least <= 0:
        return INF
    terms = product(shape[dim] for dim in dims or range(len(shape))) if mean else 1.0
    _, tiny, precision = limits(dtype)
    return math.sqrt(terms) * (1.01 + 16 * precision) * (1 + math.sqrt(tiny / least))


def _least(node: Any, low: Low) -> tuple[Any, float]:
    """Return what a value is the sum, or the larger one, of, and of a number greater than 0; else the value, and 0."""
    node = _strip(node, expanded=True)
    if name_of(node) in _ABOVE and len(node.args) == 2 and not node.kwargs:
        for one, other in (node.args, node.args[::-1]):
            if low(other) > 0:
                return _strip(one, expanded=True), low(other)
    return node, 0.0


def _strip(node: Any, *, expanded: bool = False) -> Any:
    """Return the value of which a node is a plain copy; with `expanded`, or an expansion."""
    while name_of(node) in (*COPIES, *VIEWS, "aten.expand_copy.default") and dtype_of(node.args[0]) is dtype_of(node):
        source = node.args[0]
        same = [str(size) for size in shape_of(source) or ()] == [str(size) for size in shape_of(node) or ()]
        if not same and not (expanded and name_of(node) == "aten.expand_copy.default"):
            break
        node = source
    return node


def bound_of_standardised(terms: float, eps: Any) -> float:
    """Return the largest magnitude of (x - mean) / sqrt(variance + eps) over that many terms.

    (x_i - mean) ** 2 is at most the sum of all, so the quotient is at most sqrt(n). NaN, infinities and overflows give
    NaN or 0. Where rounding has cancelled all digits, the result is within the noise of the mean; see `ValueRanges`.
    Without `eps`, a variance rounded to zero makes infinity or NaN; from 1e-36 on, squares rounded to zero stay small.
    """
    return 2.0 * math.sqrt(terms) if isinstance(eps, (int, float)) and eps >= 1e-36 else INF
