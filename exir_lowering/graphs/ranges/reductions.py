"""Transfer functions of operators that sum: reductions, products of matrices, convolutions, normalisations, pools."""

from __future__ import annotations

import math
from typing import Any

import torch

from exir_lowering.graphs.ranges.intervals import INF, TOP, Range, limits, point, settle, symmetric, total
from exir_lowering.graphs.ranges.transfers import Call, Result, keeps, product, rounds, shape_of


def _reduced(call: Call, dims: Any) -> tuple[Any, ...] | None:
    """Return the sizes of the dimensions that a call reduces, None if they are not known; without `dims`, of all."""
    shape = shape_of(call.get(0))
    if shape is None or dims is None or dims == [] or dims == ():
        return shape
    return tuple(shape[dim] for dim in ([dims] if isinstance(dims, int) else dims))


def _terms(call: Call, dims: Any) -> float:
    sizes = _reduced(call, dims)
    return INF if sizes is None else product(sizes)


@rounds("aten.sum.dim_IntList", "aten.sum", "aten.cumsum")
def _sum(call: Call) -> Range:
    return total(call.operand(0), _terms(call, call.get(1, "dim")), call.dtype)


@rounds("aten.mean.dim", "aten.mean")
def _mean(call: Call) -> Range:
    found, sizes = _average(call, _terms(call, call.get(1, "dim"))), _reduced(call, call.get(1, "dim"))
    empty = sizes is None or any(not isinstance(size, int) or size == 0 for size in sizes)
    return Range(found.low, found.high, found.nan or empty)


def _average(call: Call, terms: float) -> Range:
    """Return the range of sums of that many terms that are divided by their number."""
    a = call.operand(0)
    summed = total(a, terms, call.dtype)
    if not summed.finite or not 0 < terms < INF:
        return Range(0.0 if a.low >= 0 else -INF, 0.0 if a.high <= 0 else INF, summed.nan)
    return Range(summed.low / terms, summed.high / terms, summed.nan)


@rounds("aten.avg_pool2d", "aten.avg_pool1d", "aten.avg_pool3d")
def _avg_pool(call: Call) -> Range:
    size = call.get(1, "kernel_size")
    terms = product(size) ** (1 if len(size) > 1 else 2) if isinstance(size, (list, tuple)) else INF
    if call.get(6, "divisor_override") is not None:
        return TOP
    a = call.operand(0)
    summed = total(a, terms, call.dtype)
    if not summed.finite or call.dtype is None or terms * limits(call.dtype)[2] > 1:
        return summed
    # Without the padding the divisor is less than the size of the window, but it is the number of its terms.
    return Range(max(summed.low, min(0.0, 8 * a.low)), min(summed.high, max(0.0, 8 * a.high)), summed.nan)


@rounds("aten.adaptive_avg_pool2d", "aten._adaptive_avg_pool2d", "aten.adaptive_avg_pool1d")
def _adaptive_avg_pool(call: Call) -> Range:
    shape = shape_of(call.get(0))
    found = _average(call, product(shape[-2:])) if shape is not None else TOP
    return found if found.finite else TOP


@rounds("aten.upsample_bilinear2d.vec", "aten.upsample_bilinear2d", "aten.upsample_linear1d")
def _upsample(call: Call) -> Range:
    a = call.operand(0)  # weights in [0, 1] with sum 1
    return Range(min(0.0, 2 * a.low), max(0.0, 2 * a.high), a.nan or not a.finite)


@rounds("aten._softmax", "aten.softmax.int", "aten._safe_softmax")
def _softmax(call: Call) -> Range:
    a = call.operand(0)
    return Range(0.0, 1.01, a.nan or not a.finite)


@rounds("aten._log_softmax", "aten.log_softmax.int")
def _log_softmax(call: Call) -> Range:
    a = call.operand(0)
    low = a.low - a.high - 50.0 if a.finite else -INF  # the logarithm of the largest number of elements is 34
    return Range(low * 1.01, 0.1, a.nan or not a.finite)


def _matmul(call: Call, one: Any, other: Any) -> Range:
    """Return the range of products of matrices; the last dimension of the first one is summed."""
    shape = shape_of(one)
    terms = product(shape[-1:]) if shape else INF
    return total(call.converted(one, call.dtype) * call.converted(other, call.dtype), terms, call.dtype)


_PRODUCTS = ("aten.mm", "aten.bmm", "aten.matmul", "aten.mv", "aten.dot")
rounds(*_PRODUCTS)(lambda call: _matmul(call, call.get(0), call.get(1)))


@rounds("aten.addmm", "aten.baddbmm", "aten.addmv")
def _addmm(call: Call) -> Range:
    scaled = _matmul(call, call.get(1), call.get(2)) * call.range(call.get(4, "alpha", 1))
    return call.operand(0) * call.range(call.get(3, "beta", 1)) + settle(scaled, call.dtype)


@rounds("aten.linear")
def _linear(call: Call) -> Range:
    return _biased(call, _matmul(call, call.get(0), call.get(1, "weight")), call.get(2, "bias"))


@rounds("aten.scaled_dot_product_attention")
def _attention(call: Call) -> Range:
    """Each element is a mean of values, or 0 where everything is masked."""
    query, key, value = (call.range(call.get(position)) for position in range(3))
    mask = call.range(call.get(3, "attn_mask", 0.0) or 0.0)
    scores = total(query * key, 1e6, torch.float32)
    if not value.finite or call.get(4, "dropout_p", 0.0):
        return TOP
    nan = value.nan or scores.nan or not scores.finite or mask.nan or mask.high == INF
    return Range(min(0.0, 1.02 * value.low), max(0.0, 1.02 * value.high), nan)


def _biased(call: Call, found: Range, bias: Any) -> Range:
    return found if bias is None else found + call.converted(bias, call.dtype)


@rounds("aten.convolution")
def _convolution(call: Call) -> Range:
    shape = shape_of(call.get(1, "weight"))
    if shape is None or len(shape) < 3 or not call.operand(1, "weight").finite:
        return TOP  # an infinite weight makes NaN of padding too
    transposed = call.get(6, "transposed")
    terms = product((shape[0], *shape[2:]) if transposed else shape[1:])
    found = total(call.operand(0) * call.operand(1, "weight"), terms, call.dtype)
    return _biased(call, found, call.get(2, "bias"))


def _affine(call: Call, found: Range, weight: Any, bias: Any) -> Range:
    if weight is not None:
        found *= call.converted(weight, call.dtype)
    return _biased(call, found, bias)


_LEAST_EPS = 1e-36
"""From this `eps` on, elements whose squares are rounded to zero stay small after normalisation."""


def _standardised(terms: float, eps: Any) -> Range:
    """Return the range of (x - mean) / sqrt(variance + eps) over that many terms.

    (x_i - mean) ** 2 is at most the sum of all of them, so the quotient is at most sqrt(n). If x holds NaN or
    infinities, or the variance overflows, the row is NaN, or 0 where a finite number is divided by inf. Where rounding
    has cancelled all digits, because the elements of a row are almost equal, the result is within the noise of the
    mean; see `ValueRanges` about that. Without `eps`, a row whose variance is rounded to zero becomes infinite or NaN.
    """
    if not isinstance(eps, (int, float)) or eps < _LEAST_EPS:
        return TOP
    return symmetric(2.0 * math.sqrt(terms), True)  # whatever x is: it is not looked at


def _statistics(eps: Any) -> tuple[Range, Range]:
    inverse = 1.1 / math.sqrt(eps) if isinstance(eps, (int, float)) and eps > 0 else INF
    return TOP, Range(0.0, inverse, True) if inverse < INF else TOP


def _dtype_of_first(call: Call) -> torch.dtype | None:
    value = call.node.meta.get("val")
    value = value[0] if isinstance(value, (tuple, list)) and value else value
    return value.dtype if isinstance(value, torch.Tensor) else None


@keeps("aten.native_layer_norm", "aten.layer_norm")
def _layer_norm(call: Call) -> Result:
    several = isinstance(call.node.meta.get("val"), (tuple, list))
    call.dtype, shape = _dtype_of_first(call), call.get(1, "normalized_shape")
    if call.dtype is None or not isinstance(shape, (list, tuple)):
        return TOP
    terms = product(each.meta.get("val") if hasattr(each, "meta") else each for each in shape)
    standard = _standardised(terms, call.get(4, "eps", 1e-5))
    found = settle(_affine(call, standard, call.get(2, "weight"), call.get(3, "bias")), call.dtype)
    return (found, *_statistics(call.get(4, "eps"))) if several else found


@keeps("aten.native_group_norm")
def _group_norm(call: Call) -> Result:
    call.dtype = _dtype_of_first(call)
    channels, size, groups = (call.get(position) for position in (4, 5, 6))
    if call.dtype is None or not all(type(each) is int for each in (channels, size, groups)) or groups < 1:
        return TOP
    standard = _standardised(size * channels / groups, call.get(7, "eps"))
    found = settle(_affine(call, standard, call.get(1, "weight"), call.get(2, "bias")), call.dtype)
    return (found, *_statistics(call.get(7, "eps")))


@keeps("aten._native_batch_norm_legit_no_training")
def _batch_norm(call: Call) -> Result:
    call.dtype = _dtype_of_first(call)
    x, weight, bias, mean, variance = (call.get(position) for position in range(5))
    spread = call.range(variance)
    eps = call.get(6, "eps")
    if call.dtype is None or not isinstance(eps, (int, float)) or spread.low + eps <= 0:
        return TOP
    root = Range(math.sqrt(spread.low + eps), math.sqrt(spread.high + eps), spread.nan)
    scale = (call.converted(weight, call.dtype) if weight is not None else point(1)) / root
    shift = settle(call.range(mean) * scale, call.dtype)
    found = settle(call.converted(x, call.dtype) * scale, call.dtype) - shift
    return (settle(_biased(call, settle(found, call.dtype), bias), call.dtype), TOP, TOP)


@rounds(
    "quantized_decomposed.dequantize_per_tensor", "quantized_decomposed.dequantize_per_tensor.tensor",
    "quantized_decomposed.dequantize_per_channel",
)  # fmt: skip
def _dequantize(call: Call) -> Range:
    zero = call.get(2)
    offset = call.range(zero) if zero is not None else point(0)
    return (call.range(call.get(0)) - offset) * call.range(call.get(1))


@keeps("aten.linalg_vector_norm")
def _norm(call: Call) -> Range:
    if call.get(1, "ord", 2) != 2:
        return TOP
    a = call.operand(0)
    square = settle(Range(0.0, a.magnitude**2 if a.magnitude < 1e100 else INF, a.nan), call.dtype)
    found = total(square, _terms(call, call.get(2, "dim")), call.dtype)
    return Range(0.0, math.sqrt(found.high) * 1.1, found.nan)


rounds("aten.var.correction", "aten.var.dim")(lambda call: Range(0.0, INF, True))
