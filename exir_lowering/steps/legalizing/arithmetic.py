"""Rules for what is done to each element: integers, signs, and functions that the runtime has no kernels for.

Functions of floats are computed in float64, which leaves their results right in the narrower types.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exir_lowering.steps.legalizing.registry import rule, widened, within


def _both(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Return two operands as tensors of the type that they are computed in."""
    dtype = torch.result_type(a, b)

    def tensor(value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(dtype)
        return torch.full((), value % 256 if dtype is torch.uint8 else value, dtype=dtype)

    return tensor(a), tensor(b)


def _apart(r: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return where a remainder is not zero and its operands have different signs: floor and trunc differ there."""
    return (r != 0) & ((a < 0) != (b < 0))


@rule("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def _remainder(a: Any, b: Any) -> Any:
    a, b = _both(a, b)
    if not a.is_floating_point():
        return a - torch.div(a, b, rounding_mode="floor") * b
    r = torch.fmod(a, b)
    return torch.where(_apart(r, r, b), r + b, r)


@rule("fmod.Tensor", "fmod.Scalar")
def _fmod(a: Any, b: Any) -> Any:
    a, b = _both(a, b)
    if a.is_floating_point():
        return NotImplemented
    r = a - torch.div(a, b, rounding_mode="floor") * b
    return torch.where(_apart(r, a, b), r - b, r)


@rule("div.Tensor_mode", "div.Scalar_mode", "floor_divide.default", "floor_divide.Scalar")
def _divide(a: Any, b: Any, *, rounding_mode: str | None = "floor") -> Any:
    a, b = _both(a, b)
    if rounding_mode is None:
        return a / b
    if not a.is_floating_point():
        q = torch.div(a, b, rounding_mode="floor")
        return q if rounding_mode == "floor" else q + _apart(a - q * b, a, b).to(q.dtype)
    if rounding_mode == "trunc":
        return torch.trunc(a / b)
    dtype = a.dtype
    a, b = widened(a), widened(b)
    r, exact = torch.fmod(a, b), a / b
    q = (a - r) / b - _apart(r, r, b).to(a.dtype)
    whole = torch.floor(q)
    whole = whole + (q - whole > 0.5).to(a.dtype)
    return torch.where(b == 0, exact, torch.where(q == 0, exact * 0, whole)).to(dtype)


@rule("__lshift__.Tensor", "__lshift__.Scalar", "bitwise_left_shift.Tensor", "bitwise_left_shift.Scalar_Tensor")
def _shift_left(a: Any, b: Any) -> Any:
    dtype = torch.result_type(a, b)
    if dtype.is_floating_point or dtype is torch.bool:
        return NotImplemented
    bits = torch.iinfo(dtype).bits
    if isinstance(b, int) and 0 <= b < bits:
        return torch.bitwise_left_shift(a, b)
    a, b = _both(a, b)
    found = a * _power_of_two(b) * (1 + (b == 63).to(torch.int64))
    return torch.where((b >= 0) & (b < bits), found, 0).to(dtype)


@rule("__rshift__.Tensor", "__rshift__.Scalar", "bitwise_right_shift.Tensor", "bitwise_right_shift.Scalar_Tensor")
def _shift_right(a: Any, b: Any) -> Any:
    dtype = torch.result_type(a, b)
    if dtype.is_floating_point or dtype is torch.bool:
        return NotImplemented
    bits = torch.iinfo(dtype).bits
    if isinstance(b, int) and 0 <= b < bits:
        return torch.bitwise_right_shift(a, b)
    a, b = _both(a, b)
    found = torch.div(a.to(torch.int64), _power_of_two(b), rounding_mode="floor")
    return torch.where((b >= 0) & (b < min(bits, 63)), found, -(a < 0).to(torch.int64)).to(dtype)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return integers, exactly, with 2**62 for larger ones."""
    return torch.pow(2.0, torch.clamp(exponent, 0, 62).to(torch.float64)).to(torch.int64)


@rule("clamp.default")
def _clamp(a: Tensor, low: Any = None, high: Any = None) -> Any:
    """PyTorch's bounds of unsigned bytes are bytes too."""
    if a.dtype is not torch.uint8 or not all(isinstance(each, int | None) for each in (low, high)):
        return NotImplemented
    return torch.clamp(a, *(None if each is None else each % 256 for each in (low, high)))


@rule("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def _power(base: Any, exponent: Any) -> Any:
    dtype = torch.result_type(base, exponent)
    if dtype.is_floating_point or dtype.is_complex:
        root = not isinstance(exponent, Tensor) and exponent == 0.5
        return torch.sqrt(base.to(dtype)) if root else NotImplemented
    if not isinstance(exponent, Tensor):
        return _raised(base.to(dtype), exponent)
    a, e = _both(base, exponent)
    bits, signed = torch.iinfo(dtype).bits, dtype.is_signed
    result = torch.ones_like(a * e)
    for bit in range(bits - signed):
        result = torch.where((e & (1 << bit)) != 0, result * a, result)
        a = a * a
    a, e = _both(base, exponent)
    alternating = torch.where(a == 1, 1, torch.where(a == -1, 1 - 2 * (e & 1), 0))
    return torch.where(e < 0, alternating.to(dtype), result) if signed else result


def _raised(a: Tensor, exponent: int) -> Any:
    if exponent < 0:
        return NotImplemented
    result = torch.ones_like(a) if exponent == 0 else None
    while exponent:
        if exponent & 1:
            result = a if result is None else result * a
        a, exponent = a * a, exponent >> 1
    return result


@rule("floor.default", "ceil.default", "trunc.default", "round.default")
def _whole(a: Tensor) -> Any:
    return NotImplemented if a.is_floating_point() else a.clone()


@rule("sign.default")
def _sign(a: Tensor) -> Any:
    return a.clone() if a.dtype is torch.bool else (a > 0).to(a.dtype) - (a < 0).to(a.dtype)


@rule("sum.dim_IntList")
def sum_of_one(a: Tensor, dims: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Return a tensor without dimensions itself, which the kernel does not take."""
    wide = a.dtype if a.is_floating_point() else torch.int64
    return a.to(dtype or wide, copy=True) if a.dim() == 0 else NotImplemented


@rule("exp2.default")
def exp2(a: Tensor) -> Tensor:
    """Return powers of two."""
    return torch.pow(2.0, a)


@rule("signbit.default")
def _signbit(a: Tensor) -> Tensor:
    if not a.is_floating_point():
        return a < 0
    return (a < 0) | ((a == 0) & (torch.reciprocal(a) < 0))


@rule("copysign.Tensor", "copysign.Scalar")
def _copysign(a: Tensor, b: Any) -> Tensor:
    dtype = torch.result_type(a, b)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    negative = _signbit(b) if isinstance(b, Tensor) else math.copysign(1, b) < 0
    a = a.to(dtype)
    return torch.where(_signbit(a) != negative, -a, a)


@rule("hypot.default")
def _hypot(a: Tensor, b: Tensor) -> Tensor:
    dtype = torch.result_type(a, b)
    a, b = a.double().abs(), b.double().abs()
    large, small = torch.maximum(a, b), torch.minimum(a, b)
    ratio = small / torch.where(large == 0, 1.0, large)
    found = torch.where((a == math.inf) | (b == math.inf), math.inf, large * torch.sqrt(1 + ratio * ratio))
    return found.to(dtype)


@rule("fmax.default")
def _fmax(a: Tensor, b: Tensor) -> Tensor:
    a, b = _both(a, b)
    return torch.where(a != a, b, torch.where(b != b, a, torch.maximum(a, b)))


@rule("fmin.default")
def _fmin(a: Tensor, b: Tensor) -> Tensor:
    a, b = _both(a, b)
    return torch.where(a != a, b, torch.where(b != b, a, torch.minimum(a, b)))


@rule("angle.default")
def _angle(a: Tensor) -> Any:
    if a.is_complex():
        return NotImplemented
    found = torch.where(_signbit(a) & (a != 0) if a.dtype is not torch.bool else a & False, math.pi, 0.0)
    return torch.where(a != a, math.nan, found).to(_floats(a))


@rule("addbmm.default")
def _addbmm(x: Tensor, one: Tensor, other: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if not x.is_floating_point():
        beta, alpha = int(beta), int(alpha)
    found = widened(torch.bmm(one, other)).sum(0) * alpha
    return (found if beta == 0 else found + widened(x) * beta).to(x.dtype)


@rule("_trilinear.default")
def _trilinear(
    a: Tensor, b: Tensor, c: Tensor, expand1: Any, expand2: Any, expand3: Any, sumdim: Any, unroll_dim: int = 1
) -> Any:
    operands = []
    for operand, dims in ((a, expand1), (b, expand2), (c, expand3)):
        for dim in dims:
            operand = operand.unsqueeze(dim)
        operands.append(widened(operand))
    if not within(*torch.broadcast_shapes(*(each.shape for each in operands))):  # type: ignore[no-untyped-call]
        return NotImplemented
    product = operands[0] * operands[1] * operands[2]
    return (product.sum(tuple(sumdim)) if sumdim else product).to(a.dtype)


@rule("rrelu_with_noise_functional.default")
def _rrelu_and_noise(a: Tensor, noise: Tensor, *args: Any) -> Any:
    found = _rrelu(a, noise, *args)
    return NotImplemented if found is NotImplemented else (found, noise.clone())


@rule("empty_permuted.default")
def _empty(size: Sequence[Any], order: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return torch.zeros(size, dtype=dtype)


@rule("rrelu_with_noise.default")
def _rrelu(
    a: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *_: Any
) -> Any:
    return NotImplemented if training else torch.where(a >= 0, a, a * ((lower + upper) / 2))


@rule("_log_softmax.default")
def _log_softmax(a: Tensor, dim: int, half_to_float: bool) -> Any:
    if a.dim() == 0 or 0 in a.shape:
        return a - a
    shifted = widened(a) - widened(a).amax(dim, keepdim=True)
    found = shifted - torch.log(torch.exp(shifted).sum(dim, keepdim=True))
    return found if half_to_float else found.to(a.dtype)


def _series(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return the polynomial with these coefficients, of the highest power first."""
    found = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        found = found * x + coefficient
    return found


def _floats(a: Tensor) -> torch.dtype:
    return a.dtype if a.is_floating_point() else torch.get_default_dtype()


@rule("erfc.default")
def _erfc(a: Tensor) -> Tensor:
    return erfc_wide(a.double()).to(_floats(a))


def erfc_wide(x: Tensor) -> Tensor:
    """Return 1 - erf, in float64."""
    tail = erfc_tail(torch.clamp(x.abs(), 1.0, 30.0))
    return torch.where(x.abs() < 1, 1 - torch.erf(x), torch.where(x > 0, tail, 2 - tail))


def erfc_tail(z: Tensor, scaled: bool = False) -> Tensor:
    """Return 1 - erf from 1 on, times exp(z * z) if scaled: an integral of exp(-t * t) / (t * t + z * z), by sums."""
    step = 0.5
    total = 0.5 / (z * z)
    for k in range(1, 14):
        total = total + math.exp(-((k * step) ** 2)) / (z * z + (k * step) ** 2)
    sums, near, one = (2 * step / math.pi) * z * total, torch.clamp(z, max=6.0), torch.exp(-z * z)
    rest = 2 / (1 - torch.exp(near * (2 * math.pi / step))) * (z < 6.0)
    return sums + rest * torch.exp(near * near) if scaled else sums * one + rest


_BERNOULLI = [1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510]


@rule("lgamma.default")
def _lgamma(a: Tensor) -> Tensor:
    """Stirling's series from 8 on, which recurrence and reflection lead to."""
    x = a.double()
    mirrored = x < 0.5
    positive = torch.where(mirrored, 1 - x, x)
    low = positive < 8
    y, factor = torch.where(low, positive + 8, positive), torch.ones_like(x)
    for k in range(8):
        factor = factor * torch.where(low, positive + k, 1.0)
    terms = [b / (2 * k * (2 * k - 1)) for k, b in enumerate(_BERNOULLI, 1)]
    found = (y - 0.5) * torch.log(y) - y + 0.5 * math.log(2 * math.pi) + _series(1 / (y * y), terms[::-1]) / y
    found = found - torch.log(factor)
    sine = torch.sin((x - torch.round(x)) * math.pi)
    found = torch.where(mirrored, math.log(math.pi) - torch.log(sine.abs()) - found, found)
    found = torch.where((x == 1) | (x == 2), 0.0, found)
    found = torch.where((x <= 0) & (x == torch.floor(x)), math.inf, found)
    return torch.where(x.abs() == math.inf, math.inf, found).to(_floats(a))


@rule("digamma.default", "special_digamma.default")
def _digamma(a: Tensor) -> Tensor:
    """As `_lgamma`, whose derivative it is."""
    x = a.double()
    whole = x == torch.floor(x)
    mirrored = x < 0.5
    positive = torch.where(mirrored, 1 - x, x)
    y, found = positive + 8, torch.zeros_like(x)
    for k in range(8):
        found = found - 1 / (positive + k)
    terms = [-b / (2 * k) for k, b in enumerate(_BERNOULLI, 1)]
    found = found + torch.log(y) - 0.5 / y + _series(1 / (y * y), terms[::-1]) / (y * y)
    part = x - torch.round(x)
    found = torch.where(mirrored, found - math.pi / torch.tan(math.pi * part), found)
    found = torch.where(mirrored & whole, math.nan, found)
    return torch.where(x == 0, -torch.reciprocal(x), found).to(_floats(a))


@rule("polygamma.default")
def _polygamma(n: int, a: Tensor) -> Any:
    """The series of Euler and Maclaurin from 16 on, which recurrence and reflection lead to."""
    if n == 0:
        return _digamma(a)
    if n > 8:
        return NotImplemented
    x = a.double()
    mirrored = x < 0.5
    positive = torch.where(mirrored, 1 - x, x)
    y, found = positive + 16, torch.zeros_like(x)
    for k in range(16):
        found = found + (positive + k) ** -(n + 1)
    terms = [b / math.factorial(2 * k) * math.prod(range(n + 1, n + 2 * k)) for k, b in enumerate(_BERNOULLI, 1)]
    found = found + y**-n * (1 / n + 0.5 / y + _series(1 / (y * y), terms[::-1]) / (y * y))
    found = found * math.factorial(n)
    slopes = [0.0, 1.0]  # of the cotangent, as polynomials of it, the constant first
    for _ in range(n):
        first = [k * c for k, c in enumerate(slopes)][1:]
        slopes = [-(u + v) for u, v in zip([*first, 0.0, 0.0], [0.0, 0.0, *first], strict=True)]
    cotangent = 1 / torch.tan((x - torch.round(x)) * math.pi)
    sign = (-1) ** (n + 1)
    reflected = -(math.pi ** (n + 1)) * _series(cotangent, slopes[::-1]) - found
    found = torch.where(mirrored, reflected, sign * found)
    return torch.where((x <= 0) & (x == torch.floor(x)), sign * math.inf, found).to(_floats(a))
