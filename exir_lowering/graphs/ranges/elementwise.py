"""Transfer functions of operators that compute each element from the elements at the same place.

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
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from exir_lowering.graphs.operators.names import target_name
from exir_lowering.graphs.ranges.intervals import (
    BOOL,
    INF,
    TOP,
    Range,
    convert,
    limits,
    meet,
    point,
    settle,
    symmetric,
    union,
    whole,
)
from exir_lowering.graphs.ranges.transfers import Call, Transfer, dtype_of, keeps, name_of, product, rounds, shape_of

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
    if not isinstance(value, Node) or not isinstance(norm, Node) or call.dtype is None:
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


_LOOSE = 1e4
"""The magnitude from which on a relation between the operands is looked for, which may give a smaller one."""


def _unary(function: Callable[[Range], Range]) -> Transfer:
    """Make the function of an operator of one operand."""
    return lambda call: function(call.operand(0))


def _scaled(call: Call) -> Range:
    """Return the range of the operand that `alpha` multiplies."""
    alpha = call.get(2, "alpha", 1)
    found = call.operand(1, "other")
    return found if alpha == 1 else settle(found * call.range(alpha), call.dtype)


rounds("aten.add.Tensor", "aten.add.Scalar")(lambda call: call.operand(0) + _scaled(call))
rounds("aten.sub.Tensor", "aten.sub.Scalar")(lambda call: call.operand(0) - _scaled(call))


@rounds("aten.rsub.Tensor", "aten.rsub.Scalar")
def _rsub(call: Call) -> Range:
    return call.operand(1) - settle(call.operand(0) * call.range(call.get(2, "alpha", 1)), call.dtype)


@rounds("aten.mul.Tensor", "aten.mul.Scalar")
def _mul(call: Call) -> Range:
    one, other = call.get(0), call.get(1, "other")
    found = call.operand(0) * call.operand(1, "other")
    if one is other:  # the same number twice: a square, and inf * inf is no NaN
        square = call.operand(0)
        found = Range(max(0.0, found.low) if not square.has_zero else 0.0, found.high, square.nan)
    elif found.magnitude > _LOOSE:
        for value, norm in ((one, other), (other, one)):
            found = meet(found, normalised(call, value, norm, inverted=True) or found)
    return found


@rounds("aten.div.Tensor", "aten.div.Scalar")
def _div(call: Call) -> Range:
    found = call.operand(0) / call.operand(1, "other")
    if found.magnitude > _LOOSE:
        found = meet(found, normalised(call, call.get(0), call.get(1, "other"), inverted=False) or found)
    return found


@rounds("aten.div.Tensor_mode", "aten.div.Scalar_mode", "aten.floor_divide")
def _div_mode(call: Call) -> Range:
    quotient = call.operand(0) / call.operand(1, "other")
    return Range(quotient.low - 1, quotient.high + 1, quotient.nan)


def _abs(a: Range) -> Range:
    return Range(0.0 if a.has_zero else min(abs(a.low), abs(a.high)), a.magnitude, a.nan)


def _root(a: Range) -> Range:
    if a.low <= 0:
        return TOP  # of 0.0 it is inf, of -0.0 -inf
    return Range(1 / math.sqrt(a.high), 1 / math.sqrt(a.low), a.nan)


rounds("aten.neg")(_unary(lambda a: -a))
rounds("aten.abs")(_unary(_abs))
rounds("aten.rsqrt")(_unary(_root))
rounds("aten.reciprocal")(_unary(lambda a: point(1) / a))
keeps("aten.relu")(_unary(lambda a: Range(max(0.0, a.low), max(0.0, a.high), a.nan)))
rounds("aten.floor", "aten.ceil", "aten.round", "aten.trunc")(_unary(lambda a: Range(a.low - 1, a.high + 1, a.nan)))
keeps("aten._to_copy", "dim_order_ops._to_dim_order_copy", "aten.to.dtype")(_unary(lambda a: a))
keeps("aten.clone", "aten.type_as", "dim_order_ops._clone_dim_order")(_unary(lambda a: a))


@rounds("aten.leaky_relu", "aten.elu", "aten.celu", "aten.prelu", "aten._prelu_kernel")
def _leaky(call: Call) -> Range:
    slope = call.get(1, "negative_slope", 1.0)
    a, factor = call.operand(0), call.range(slope)
    if not factor.finite or len(call.node.args) > 2 or call.node.kwargs:
        return TOP
    scaled = a * Range(min(0.0, factor.low), max(1.0, factor.high), factor.nan)
    return Range(min(scaled.low, -factor.magnitude), max(0.0, scaled.high), a.nan or factor.nan or not a.finite)


def _gate(lowest: float) -> Transfer:
    """Make the function of x times something in [0, 1] that is never less than a number; -inf times 0 is NaN."""
    return _unary(lambda a: Range(lowest if a.low < 0 else 0.0, max(0.0, a.high), a.nan or not a.finite))


rounds("aten.gelu")(_gate(-0.2))  # the least values are -0.170 and, by tanh, -0.1701
rounds("aten.silu")(_gate(-0.3))  # -0.2785
rounds("aten.hardswish")(_gate(-0.4))  # -0.375
rounds("aten.mish")(_gate(-0.35))  # -0.3088


def _within(low: float, high: float, *, infinite: bool = False) -> Transfer:
    """Make the function of an operator with a fixed range; `infinite`: whether it makes NaN of an infinity."""
    return _unary(lambda a: Range(low, high, a.nan or (infinite and not a.finite)))


rounds("aten.sigmoid", "aten.hardsigmoid")(_within(0.0, 1.0))
rounds("aten.tanh", "aten.erf")(_within(-1.0, 1.0))
rounds("aten.sin", "aten.cos")(_within(-1.0, 1.0, infinite=True))
rounds("aten.atan")(_within(-1.6, 1.6))


def _monotone(function: Callable[[float], float], least: float) -> Transfer:
    """Make the function of an increasing operator that is defined from a number on, with NaN below it."""
    return _unary(lambda a: Range(function(max(a.low, least)), function(max(a.high, least)), a.nan or a.low < least))


def _exp(number: float) -> float:
    return INF if number > 709 else math.exp(number)


def _log(number: float) -> float:
    return INF if number == INF else math.log(number) if number > 0 else -INF


rounds("aten.exp")(_monotone(_exp, -INF))
rounds("aten.expm1")(_monotone(lambda number: _exp(number) - 1, -INF))
rounds("aten.log")(_monotone(_log, 0.0))
rounds("aten.log1p")(_monotone(lambda number: _log(number + 1), -1.0))
rounds("aten.log2")(_monotone(lambda number: _log(number) / math.log(2), 0.0))
rounds("aten.sqrt")(_monotone(math.sqrt, 0.0))


@rounds("aten.pow.Tensor_Scalar")
def _pow(call: Call) -> Range:
    a, exponent = call.operand(0), call.get(1, "exponent")
    if exponent == 0.5:
        return Range(0.0, math.sqrt(max(0.0, a.high)), a.nan or a.low < 0)
    if exponent == -0.5:
        return _root(a)
    if exponent == -1:
        return point(1) / a
    if not isinstance(exponent, (int, float)) or exponent <= 0 or exponent != int(exponent) or exponent > 64:
        return TOP
    powers = [_power(number, int(exponent)) for number in (a.low, a.high)]
    even = exponent % 2 == 0
    return Range(0.0 if even and a.has_zero else min(powers), max(powers), a.nan)


def _power(number: float, exponent: int) -> float:
    try:
        return float(number**exponent)
    except OverflowError:
        return INF if number > 0 or exponent % 2 == 0 else -INF


def _clamped(call: Call, least: object, most: object) -> Range:
    found = call.operand(0)
    for argument, which in ((least, max), (most, min)):
        if argument is not None:
            found = _extreme_of(which, found, call.converted(argument, call.dtype))
    return found


def _extreme_of(which: Callable[[float, float], float], a: Range, b: Range) -> Range:
    """Return the range of the larger, or the smaller, of two numbers."""
    return Range(which(a.low, b.low), which(a.high, b.high), a.nan or b.nan)


keeps("aten.hardtanh")(lambda call: _clamped(call, call.get(1, "min_val", -1), call.get(2, "max_val", 1)))
keeps("aten.clamp", "aten.clamp.Tensor")(lambda call: _clamped(call, call.get(1, "min"), call.get(2, "max")))


def _extreme(which: Callable[[float, float], float]) -> Transfer:
    """Make the function of the larger, or the smaller, of two operands."""
    return lambda call: _extreme_of(which, call.operand(0), call.operand(1))


keeps("aten.clamp_min", "aten.maximum", "aten.clamp_min.Tensor")(_extreme(max))
keeps("aten.clamp_max", "aten.minimum", "aten.clamp_max.Tensor")(_extreme(min))


@rounds("aten.fmod.Scalar", "aten.fmod.Tensor", "aten.remainder.Scalar", "aten.remainder.Tensor")
def _remainder(call: Call) -> Range:
    a, b = call.operand(0), call.operand(1, "other")
    if not b.finite:
        return TOP
    # The remainder is less than the divisor; of an infinity, and by zero, it is NaN, or an error of integers.
    return symmetric(b.magnitude, a.nan or b.nan or a.has_infinity or b.has_zero)


@keeps("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def _where(call: Call) -> Range:
    condition = call.range(call.get(0))
    if condition.low >= 1:
        return call.operand(1)
    if condition.high <= 0 and not condition.nan:
        return call.operand(2)
    return union((call.operand(1), call.operand(2)))


@keeps("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def _masked_fill(call: Call) -> Range:
    mask = _as_bool(call, 1)
    kept = [call.operand(0)] if mask.low < 1 else []
    return union((*kept, *([call.operand(2)] if mask.high > 0 else [])))


keeps("aten.copy")(lambda call: call.operand(1, "src"))


def _comparison(call: Call) -> Range:
    """Return the range of a comparison: known if every number is on one side of the other ones."""
    name, other = target_name(call.node.target).split(".")[1], call.get(1, "other")
    dtype, given = dtype_of(call.get(0)), call.range(other)
    exact, possible = dtype is dtype_of(other), whole(dtype)
    if isinstance(other, (int, float)):  # an integer that the type has, and so have its neighbours
        most = 2**8 if dtype in (torch.float16, torch.bfloat16) else 2**24
        exact = abs(other) < most and other == int(other) and possible.low <= other <= possible.high
    one = call.range(call.get(0))
    if dtype is None or not exact or one.nan or given.nan:
        return BOOL  # what is compared is rounded before
    one, given = (given, one) if name in ("gt", "ge") else (one, given)
    if one.high < given.low:
        return point(name != "eq")
    if given.high < one.low:
        return point(name == "ne")
    if one.high <= given.low and name in ("le", "ge"):
        return point(True)
    return point(name in ("eq", "le", "ge")) if one.low == one.high == given.low == given.high else BOOL


keeps(*(f"aten.{name}.{kind}" for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Scalar", "Tensor")))(
    _comparison
)


@keeps(
    "aten.logical_xor", "aten.isnan", "aten.isinf", "aten.any", "aten.any.dim", "aten.any.dims", "aten.all",
    "aten.all.dim", "aten.all.dims",
)  # fmt: skip
def _truth(call: Call) -> Range:
    return BOOL


def _as_bool(call: Call, position: int) -> Range:
    argument = call.get(position)
    found = call.range(argument)
    return convert(found, torch.float64, torch.bool) if dtype_of(argument) is not None else BOOL


@keeps("aten.logical_not")
def _logical_not(call: Call) -> Range:
    a = _as_bool(call, 0)
    return Range(1 - a.high, 1 - a.low, False)


def _of_both(which: Callable[[float, float], float]) -> Transfer:
    """Make the function of a conjunction, or a disjunction, of two truth values."""
    return lambda call: _extreme_of(which, _as_bool(call, 0), _as_bool(call, 1))


_both, _either = _of_both(min), _of_both(max)
keeps("aten.logical_and")(_both)
keeps("aten.logical_or")(_either)


def _bitwise(of_bools: Transfer) -> Transfer:
    """Make the function of an operator on bits, from that on truth values."""
    return lambda call: of_bools(call) if call.dtype is torch.bool else whole(call.dtype)


keeps("aten.bitwise_and.Tensor", "aten.__and__.Tensor")(_bitwise(_both))
keeps("aten.bitwise_or.Tensor", "aten.__or__.Tensor")(_bitwise(_either))
keeps("aten.bitwise_xor.Tensor", "aten.bitwise_not")(_bitwise(_truth))
