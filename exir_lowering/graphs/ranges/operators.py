"""The range of each operator's results, from the ranges of its operands: those that reach the scores of attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from exir_lowering.errors import ignoring_errors
from exir_lowering.graphs.operators.names import argument
from exir_lowering.graphs.ranges.intervals import INF, TOP, Range, convert, settle, total, union, whole
from exir_lowering.graphs.ranges.known_values import FILLED, PIECES, filling
from exir_lowering.graphs.ranges.nodes import MOVEMENTS, dtype_of, name_of, product, shape_of
from exir_lowering.graphs.ranges.norms import bound_of_standardised, normalised
from exir_lowering.graphs.walking import is_getitem

_NORMS = {"aten.native_layer_norm.default": (2, 3), "aten.native_group_norm.default": (1, 2)}
"""Normalisations, with the positions of weight and bias: what they normalise is not looked at."""

_POOLS = ("aten.max_pool2d.default", "aten.max_pool2d_with_indices.default")


class Call:
    """A call of an operator whose operands have been analysed."""

    __slots__ = ("dtype", "node", "ranges")

    def __init__(self, node: Node, ranges: Mapping[Node, Range], dtype: torch.dtype) -> None:
        self.node, self.ranges, self.dtype = node, ranges, dtype  # the type of the result

    def get(self, position: int, default: Any = None) -> Any:
        """Return an argument."""
        return self.node.args[position] if position < len(self.node.args) else default

    def converted(self, value: Any) -> Range:
        """Return the range of an operand after its conversion to the type of the result."""
        if isinstance(value, Node):
            return convert(self.ranges[value], dtype_of(value), self.dtype)
        if isinstance(value, float) and not self.dtype.is_floating_point:
            return whole(self.dtype)
        return settle(Range(float(value), float(value)), self.dtype)

    def operand(self, position: int) -> Range:
        """Return the range of the operand at a position after its conversion to the type of the result."""
        return self.converted(self.node.args[position])

    def times(self, found: Range, factor: str) -> Range:
        """Return a range times an argument such as "alpha"."""
        value = argument(self.node, factor)
        return found if value is None or value == 1 else settle(found * self.converted(value), self.dtype)

    def biased(self, found: Range, position: int) -> Range:
        """Return a range plus an operand that may be left out."""
        return found if self.get(position) is None else settle(found, self.dtype) + self.operand(position)


def operands(node: Node) -> Sequence[Node]:
    """Return the operands on which the range of a node depends."""
    if is_getitem(node) and isinstance(node.args[0], Node):
        return operands(node.args[0])
    if node.op != "call_function":
        return ()
    places = _NORMS.get(name_of(node))
    if places is None:
        return node.all_input_nodes
    return [each for each in (node.args[place] for place in places if place < len(node.args)) if isinstance(each, Node)]


def range_of(node: Node, ranges: Mapping[Node, Range]) -> Range:
    """Return the range of a call's result from those of `operands`; of several results, as a whole, nothing is said."""
    dtype, call = dtype_of(node), node
    if is_getitem(node) and isinstance(node.args[0], Node):
        call = node.args[0]
        if name_of(call) not in (PIECES if node.args[1] else (*PIECES, *_NORMS, *_POOLS)):
            return whole(dtype)
    name = name_of(call)
    transfer = _EXACT.get(name) or _ROUNDED.get(name)
    if transfer is None or dtype is None:
        return whole(dtype)
    with ignoring_errors():  # arguments that the operator does not take, or sizes that are not known
        found = transfer(Call(call, ranges, dtype))
        return found if name in _EXACT else settle(found, dtype)
    return whole(dtype)


def _filled(call: Call) -> Range:
    number = filling(call.node, call.dtype)
    return whole(call.dtype) if number is None or number != number else Range(number, number)


def _arange(call: Call) -> Range:
    """Count integers, in steps of 1."""
    start, end = call.get(0), call.get(1)
    most = product([end.meta["val"] if isinstance(end, Node) else end])
    counts = type(start) is int and call.get(2, 1) == 1 and not call.dtype.is_floating_point
    return Range(float(start), max(float(start), most)) if counts else whole(call.dtype)


def _is_at_least(call: Call) -> Range:
    """Positions are at least 0: a mask that only asks this is true everywhere."""
    value, number = call.get(0), call.get(1)
    dtype = dtype_of(value)
    counted = dtype is not None and not dtype.is_floating_point and not dtype.is_complex
    return Range(1.0, 1.0) if counted and call.ranges[value].low >= number else whole(torch.bool)


def _clamp(call: Call, least: Any = None, most: Any = None) -> Range:
    found = call.operand(0)
    for bound, which in ((call.get(1, least), max), (call.get(2, most), min)):
        if bound is not None:
            other = call.converted(bound)
            found = Range(which(found.low, other.low), which(found.high, other.high))
    return found


def _pooled(call: Call) -> Range:
    """Padding takes part in no maximum; a window with gaps may see nothing else."""
    return TOP if any(each != 1 for each in call.get(4, ())) else call.operand(0)


_EXACT: dict[str, Callable[[Call], Range]] = {
    **dict.fromkeys(
        (
            *MOVEMENTS, *PIECES, "aten.index.Tensor", "aten.embedding.default", "aten.repeat.default",
            "aten.flip.default", "aten.index_select.default", "aten.gather.default",
            "aten.upsample_nearest2d.vec", "aten.pixel_shuffle.default", "aten.pixel_unshuffle.default",
        ),
        lambda call: call.operand(0),
    ),
    **dict.fromkeys(FILLED, _filled),
    "aten.arange.start_step": _arange,
    "aten.ge.Scalar": _is_at_least,
    **dict.fromkeys(_POOLS, _pooled),
    "aten.copy.default": lambda call: call.operand(1),
    "aten.cat.default": lambda call: union(map(call.converted, call.get(0))),
    "aten.where.self": lambda call: union((call.operand(1), call.operand(2))),
    "aten.constant_pad_nd.default": lambda call: union((call.operand(0), call.converted(call.get(2, 0)))),
    "aten.slice_scatter.default": lambda call: union((call.operand(0), call.operand(1))),
    "aten.select_scatter.default": lambda call: union((call.operand(0), call.operand(1))),
    "aten.index_put.default": lambda call: TOP if call.get(3) else union((call.operand(0), call.operand(2))),
    "aten.clamp.default": _clamp,
    "aten.hardtanh.default": lambda call: _clamp(call, -1, 1),
}  # fmt: skip
"""Operators whose results consist of elements of their operands: nothing is rounded."""


def _mul(call: Call) -> Range:
    (one, other), a = call.node.args[:2], call.operand(0)
    found = a * call.operand(1)
    if one is other:  # a square
        return Range(0.0 if a.has_zero else max(0.0, found.low), found.high)
    found = _by_norm(call, found, one, other, inverted=True)
    return _by_norm(call, found, other, one, inverted=True)


def _by_norm(call: Call, found: Range, value: Any, norm: Any, *, inverted: bool) -> Range:
    """Return the range of a value divided by something, or times it, which may be the value's own norm."""
    if found.magnitude < 1e4:
        return found
    bound = normalised(value, norm, lambda each: call.converted(each).low, inverted=inverted)
    low, high = max(found.low, -bound), min(found.high, bound)
    return Range(low, high) if low <= high else found


def _power(call: Call) -> Range:
    a, exponent = call.operand(0), call.get(1)
    if exponent in (0.5, -0.5):
        return _root(a) if exponent > 0 else _inverse_root(a)
    found = a
    for _ in range({1: 0, 2: 1, 3: 2, 4: 3}[exponent]):
        found = found * a
    return Range(max(0.0, found.low), found.high) if exponent % 2 == 0 else found


def _root(a: Range) -> Range:
    return Range(math.sqrt(max(0.0, a.low)), math.sqrt(max(0.0, a.high)))


def _inverse_root(a: Range) -> Range:
    return TOP if a.low <= 0 else Range(1 / math.sqrt(a.high), 1 / math.sqrt(a.low))  # of 0.0 it is inf, of -0.0 -inf


def _dequantize(call: Call) -> Range:
    zero = Range(0.0, 0.0) if call.get(2) is None else call.operand(2)
    return (call.operand(0) - zero) * call.operand(1)


def _shape(node: Any) -> tuple[Any, ...]:
    shape = shape_of(node)
    if shape is None:
        raise ValueError("nothing is known about its sizes")
    return shape


def _reduced(call: Call) -> float:
    """Return the number of terms of a reduction."""
    shape, dims = _shape(call.get(0)), call.get(1)
    return product(shape if dims is None or dims == [] else (shape[dim] for dim in dims))


def _mean(call: Call) -> Range:
    a, terms = call.operand(0), _reduced(call)
    summed = total(a, terms, call.dtype)
    if not summed.finite or terms <= 0:
        return Range(0.0 if a.low >= 0 else -INF, 0.0 if a.high <= 0 else INF)
    return Range(summed.low / terms, summed.high / terms)


def _products(call: Call, one: int, other: int) -> Range:
    """Return the range of products of matrices; the last dimension of the first one is summed."""
    return total(call.operand(one) * call.operand(other), product(_shape(call.get(one))[-1:]), call.dtype)


def _addmm(call: Call) -> Range:
    return call.times(call.operand(0), "beta") + call.times(_products(call, 1, 2), "alpha")


def _convolution(call: Call) -> Range:
    shape = _shape(call.get(1))
    if not call.operand(1).finite:
        return TOP  # an infinite weight makes NaN of padding too
    terms = product((shape[0], *shape[2:]) if call.get(6) else shape[1:])
    return call.biased(total(call.operand(0) * call.operand(1), terms, call.dtype), 2)


def _norm(call: Call) -> Range:
    weight, bias = _NORMS[name_of(call.node)]
    if weight == 2:
        terms, eps = product(_shape(call.get(0))[-len(call.get(1)) :]), call.get(4)
    else:
        channels, size, groups, eps = (call.get(position) for position in (4, 5, 6, 7))
        terms = size * channels / groups
    found = bound_of_standardised(terms, eps)
    return call.biased(Range(-found, found) * (call.operand(weight) if call.get(weight) else Range(1.0, 1.0)), bias)


_ROUNDED: dict[str, Callable[[Call], Range]] = {
    **dict.fromkeys(
        ("aten.add.Tensor", "aten.add.Scalar"), lambda call: call.operand(0) + call.times(call.operand(1), "alpha")
    ),
    **dict.fromkeys(
        ("aten.sub.Tensor", "aten.sub.Scalar"), lambda call: call.operand(0) - call.times(call.operand(1), "alpha")
    ),
    **dict.fromkeys(("aten.mul.Tensor", "aten.mul.Scalar"), _mul),
    **dict.fromkeys(
        ("aten.div.Tensor", "aten.div.Scalar"),
        lambda call: _by_norm(call, call.operand(0) / call.operand(1), *call.node.args[:2], inverted=False),
    ),
    "aten.neg.default": lambda call: -call.operand(0),
    "aten.relu.default": lambda call: Range(max(0.0, call.operand(0).low), max(0.0, call.operand(0).high)),
    "aten.sqrt.default": lambda call: _root(call.operand(0)),
    "aten.rsqrt.default": lambda call: _inverse_root(call.operand(0)),
    "aten.pow.Tensor_Scalar": _power,
    "aten.gelu.default": lambda call: Range(-0.2, max(0.0, call.operand(0).high)),  # at least -0.1701
    "aten.sigmoid.default": lambda call: Range(0.0, 1.0),
    **dict.fromkeys(("aten.tanh.default", "aten.sin.default", "aten.cos.default"), lambda call: Range(-1.0, 1.0)),
    "aten._softmax.default": lambda call: Range(0.0, 1.01),
    **dict.fromkeys(
        (
            f"quantized_decomposed.dequantize_per_{kind}"
            for kind in ("tensor.default", "tensor.tensor", "channel.default")
        ),
        _dequantize,
    ),
    "aten.sum.dim_IntList": lambda call: total(call.operand(0), _reduced(call), call.dtype),
    **dict.fromkeys(("aten.mean.dim", "aten.mean.default"), _mean),
    **dict.fromkeys(("aten.mm.default", "aten.bmm.default"), lambda call: _products(call, 0, 1)),
    "aten.linear.default": lambda call: call.biased(_products(call, 0, 1), 2),
    **dict.fromkeys(("aten.addmm.default", "aten.baddbmm.default"), _addmm),
    "aten.convolution.default": _convolution,
    **dict.fromkeys(_NORMS, _norm),
}
"""Operators whose results are rounded to their type."""
