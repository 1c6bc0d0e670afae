"""Bounds that follow from how values depend on each other: what is divided by its own norm is bounded.

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
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from exir_lowering.graphs.ranges.intervals import Range, limits, symmetric
from exir_lowering.graphs.ranges.transfers import Call, dtype_of, name_of, product, shape_of

_SAME = ("aten.clone.default", "dim_order_ops._clone_dim_order.default", "aten.alias_copy.default")
_CASTS = ("aten._to_copy.default", "dim_order_ops._to_dim_order_copy.default", "aten.to.dtype")
_SHAPED = ("aten.expand_copy.default", "aten.view_copy.default", "aten.expand.default", "aten.view.default")
_SUMS = ("aten.mean.dim", "aten.sum.dim_IntList")
_MINIMA = ("aten.clamp.default", "aten.clamp_min.default", "aten.maximum.default", "aten.clamp.Tensor")


@dataclass(frozen=True, slots=True)
class _Power:
    """A value that is, in each row, at least x_i ** 2 / `terms` + `least` for each element x_i of the row."""

    source: Node  # x; the rows have the same sizes, except for dimensions of size 1
    terms: float
    least: float  # at least 0


def normalised(call: Call, value: Any, norm: Any, *, inverted: bool) -> Range | None:
    """Return the range of a value divided by its own norm, or times one by it (`inverted`); None if not known to be."""
    if not isinstance(value, Node) or not isinstance(norm, Node) or call.dtype is None or not call.related:
        return None
    if dtype_of(value) is not call.dtype or dtype_of(norm) is not call.dtype or not call.dtype.is_floating_point:
        return None
    norm = _strip(norm, expanded=True)
    found = _find_inverse(call, norm) if inverted else _find_root(call, norm)
    if found is None or found.least <= 0 or found.source is not _strip(value) or not math.isfinite(found.terms):
        return None
    tiny, precision = limits(call.dtype)[1:]
    bound = math.sqrt(found.terms) * (1.01 + 16 * precision) * (1 + math.sqrt(tiny / found.least))
    given = call.range(value)
    # Without NaN and infinities in x there is no NaN: the norm is a number greater than 0, or inf.
    return symmetric(bound, given.nan or not given.finite)


def _find_inverse(call: Call, node: Node) -> _Power | None:
    """Find what a value is one by the root of."""
    name = name_of(node)
    if name == "aten.rsqrt.default" or (name == "aten.pow.Tensor_Scalar" and node.args[1] == -0.5):
        return _find_power(call, node.args[0])
    if name == "aten.reciprocal.default":
        return _find_root(call, node.args[0])
    return None


def _find_root(call: Call, node: Any) -> _Power | None:
    """Find what a value is at least the root of: sqrt(p), or sqrt(p) + e and max(sqrt(p), e) for an e > 0."""
    for root, least in _apart(call, node):
        name = name_of(root)
        power = None
        if name == "aten.sqrt.default" or (name == "aten.pow.Tensor_Scalar" and root.args[1] == 0.5):
            power = _find_power(call, root.args[0])
        elif name == "aten.linalg_vector_norm.default" and len(root.args) > 3:
            source, order, dims, keepdim = root.args[:4]
            power = _reduced(root, source, dims, mean=False) if order == 2 and keepdim is True else None
        if power is not None:
            return _Power(power.source, power.terms, max(power.least, least**2))
    return None


def _find_power(call: Call, node: Any) -> _Power | None:
    """Find of what a value is at least the mean, or sum, of squares: m, m + e or max(m, e) for an e > 0."""
    for reduced, least in _apart(call, node):
        name = name_of(reduced)
        if name in _SUMS and len(reduced.args) > 2 and reduced.args[2] is True and not reduced.kwargs.get("dtype"):
            squared = _squared(reduced.args[0])
            power = _reduced(reduced, squared, reduced.args[1], mean=name == "aten.mean.dim")
            if power is not None:
                return _Power(power.source, power.terms, least)
    return None


def _apart(call: Call, node: Any) -> list[tuple[Any, float]]:
    """Return what a value may be made of by adding a number greater than 0, or by not letting it fall below one."""
    node = _strip(node, expanded=True)
    if name_of(node) not in ("aten.add.Tensor", "aten.add.Scalar", *_MINIMA) or len(node.args) != 2 or node.kwargs:
        return [(node, 0.0)]
    found = []
    for one, other in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
        least = call.converted(other, call.dtype)
        if least.low > 0 and not least.nan:
            found.append((_strip(one, expanded=True), least.low))
    return found


def _squared(node: Any) -> Node | None:
    name = name_of(node)
    if name == "aten.pow.Tensor_Scalar" and node.args[1] == 2 and isinstance(node.args[0], Node):
        return node.args[0]
    if name in ("aten.mul.Tensor", "aten.square.default") and isinstance(node.args[0], Node):
        return node.args[0] if node.args[0] is node.args[-1] else None
    return None


def _reduced(node: Node, source: Any, dims: Any, *, mean: bool) -> _Power | None:
    """Return what a reduction that keeps its dimensions says about what it reduces."""
    shape = shape_of(source)
    if shape is None or dtype_of(source) is not dtype_of(node):
        return None
    dims = range(len(shape)) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    terms = product(shape[dim] for dim in dims) if mean else 1.0
    return _Power(_strip(source), terms, 0.0)


def _strip(node: Any, *, expanded: bool = False) -> Any:
    """Return the value of which a node is a plain copy; with `expanded`, or an expansion."""
    while name_of(node) and node.args and isinstance(node.args[0], Node):
        name, source = name_of(node), node.args[0]
        shape = shape_of(source)
        fixed = all(type(size) is int for size in (*(shape or ()), *(shape_of(node) or ())))
        unchanged = fixed and shape is not None and shape == shape_of(node)
        same = name in _SAME or (name in _CASTS and dtype_of(source) is dtype_of(node))
        if not same and not (name in _SHAPED and unchanged) and not (expanded and name in _SHAPED[::2]):
            return node
        node = source
    return node
