"""Rules for what is done to each element, and for products and sums that the runtime has no kernels for."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from exir_lowering.steps.legalizing.registry import Failed, require, require_small, rules


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


def _remainder(a: Any, b: Any) -> Any:
    a, b = _both(a, b)
    if not a.is_floating_point():
        return a - torch.div(a, b, rounding_mode="floor") * b
    r = torch.fmod(a, b)
    return torch.where(_apart(r, r, b), r + b, r)


def _fmod(a: Any, b: Any) -> Any:
    a, b = _both(a, b)
    require(not a.is_floating_point())
    r = _remainder(a, b)
    return torch.where(_apart(r, a, b), r - b, r)


def _divide(a: Any, b: Any, *, rounding_mode: str | None) -> Any:
    a, b = _both(a, b)
    if a.is_floating_point() or rounding_mode is None:
        require(rounding_mode != "floor")
        return torch.trunc(a / b) if rounding_mode == "trunc" else a / b
    q = torch.div(a, b, rounding_mode="floor")
    return q if rounding_mode == "floor" else q + _apart(a - q * b, a, b).to(q.dtype)


def _shift(a: Any, b: Any, shift: Any) -> Any:
    dtype, left = torch.result_type(a, b), shift is torch.bitwise_left_shift
    require(not dtype.is_floating_point and dtype is not torch.bool)
    most = torch.iinfo(dtype).bits - 1
    if isinstance(b, int) and 0 <= b <= most:
        return shift(a, b)
    a, b = _both(a, b)
    inside = (b >= 0) & (b <= most)  # otherwise nothing is left but the sign
    found = shift(a, torch.clamp(torch.where(inside, b, most), 0, most))
    return torch.where(inside, found, 0) if left or not dtype.is_signed else found


def _power(base: Any, exponent: Any) -> Any:
    dtype, known = torch.result_type(base, exponent), not isinstance(exponent, Tensor)
    if dtype.is_floating_point or dtype.is_complex:
        require(known and exponent == 0.5)
        return torch.sqrt(base.to(dtype))
    require(not known or exponent >= 0)
    a, e = _both(base, exponent)
    square = a
    result: Any = torch.ones_like(a if known else a * e) if not known or exponent == 0 else None
    for bit in range(exponent.bit_length() if known else torch.iinfo(dtype).bits - dtype.is_signed):
        if not known:
            result = torch.where((e & (1 << bit)) != 0, result * square, result)
        elif exponent >> bit & 1:
            result = square if result is None else result * square
        square = square * square
    if known or not dtype.is_signed:
        return result
    alternating = torch.where(a == 1, 1, torch.where(a == -1, 1 - 2 * (e & 1), 0))
    return torch.where(e < 0, alternating.to(dtype), result)


def _sum_of_one(a: Tensor, dims: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    require(a.dim() == 0)  # which the kernel does not take
    return a.to(dtype or (a.dtype if a.is_floating_point() else torch.int64), copy=True)


def _signbit(a: Tensor) -> Tensor:
    return (a < 0) | ((a == 0) & (torch.reciprocal(a) < 0)) if a.is_floating_point() else a < 0


def _copysign(a: Tensor, b: Any) -> Tensor:
    """The kernels leave the sign of zero in absolute values, and give a scalar tensor none."""
    dtype = torch.result_type(a, b)
    a = a.to(dtype if dtype.is_floating_point else torch.get_default_dtype())
    negative = _signbit(b) if isinstance(b, Tensor) else math.copysign(1, b) < 0
    return torch.where(_signbit(a) != negative, -a, a)


def _hypot(a: Tensor, b: Tensor) -> Tensor:
    large, small = torch.maximum(a.abs(), b.abs()), torch.minimum(a.abs(), b.abs())
    ratio = small / torch.where(large == 0, 1.0, large)
    return torch.where((a.abs() == math.inf) | (b.abs() == math.inf), math.inf, large * torch.sqrt(1 + ratio * ratio))


def _skipping_nan(a: Tensor, b: Tensor, extreme: Any) -> Tensor:
    a, b = _both(a, b)
    return torch.where(a != a, b, torch.where(b != b, a, extreme(a, b)))


def _addbmm(x: Tensor, one: Tensor, other: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if not x.is_floating_point():
        beta, alpha = int(beta), int(alpha)
    found = torch.bmm(one, other).sum(0) * alpha
    return found if beta == 0 else found + x * beta


def _trilinear(a: Tensor, b: Tensor, c: Tensor, *dims: Any) -> Any:
    """Return the product of three tensors with dimensions put in, summed over some."""
    product: Any = 1
    for operand, added in zip((a, b, c), dims, strict=False):
        for dim in added:
            operand = operand.unsqueeze(dim)
        product = product * operand
    require_small(*product.shape)
    return product.sum(tuple(dims[3])) if dims[3] else product


def _rrelu(a: Tensor, noise: Tensor, low: float = 1 / 8, high: float = 1 / 3, training: bool = False, *_: Any) -> Any:
    if training:
        raise Failed("other operators would draw other random numbers")
    return torch.where(a >= 0, a, a * ((low + high) / 2))


_LEFT, _RIGHT = (
    f"__{way[0]}shift__.Tensor __{way[0]}shift__.Scalar bitwise_{way}_shift.Tensor bitwise_{way}_shift.Scalar_Tensor"
    for way in ("left", "right")
)

rules(
    {
        "remainder.Tensor remainder.Scalar remainder.Scalar_Tensor": _remainder,
        "fmod.Tensor fmod.Scalar": _fmod,
        "div.Tensor_mode div.Scalar_mode": _divide,
        _LEFT: lambda a, b: _shift(a, b, torch.bitwise_left_shift),
        _RIGHT: lambda a, b: _shift(a, b, torch.bitwise_right_shift),
        "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar": _power,
        "sign": lambda a: a.clone() if a.dtype is torch.bool else (a > 0).to(a.dtype) - (a < 0).to(a.dtype),
        "sum.dim_IntList": _sum_of_one,
        "signbit": _signbit,
        "copysign.Tensor copysign.Scalar": _copysign,
        "fmax": lambda a, b: _skipping_nan(a, b, torch.maximum),
        "fmin": lambda a, b: _skipping_nan(a, b, torch.minimum),
        "_int_mm": lambda a, b: torch.mm(a.to(torch.int32), b.to(torch.int32)),  # 32 bits hold these products
        "prelu": lambda a, weight: torch.where(a > 0, a, a * weight.reshape([-1] + [1] * max(a.dim() - 2, 0))),
        # Any random numbers are as good, and eager mode's are not those of the runtime either.
        "bernoulli bernoulli.p bernoulli.Tensor": lambda a, p=None, *, generator=None: (
            torch.rand(a.shape, dtype=torch.float32) < (a if p is None else p)
        ).to(a.dtype),
        "_is_all_true": torch.all,
        "_is_any_true": torch.any,
        "rrelu_with_noise": _rrelu,
        "rrelu_with_noise_functional": lambda a, noise, *given: (_rrelu(a, noise, *given), noise.clone()),
        "empty_permuted": lambda size, order, *, dtype=None, **_: torch.zeros(size, dtype=dtype),
    }
)
rules({"addbmm": _addbmm, "_trilinear": _trilinear}, wide=torch.float32)
rules(
    {
        "exp2": lambda a: torch.pow(2.0, a),
        "hypot": _hypot,
        "angle": lambda a: torch.where(a != a, math.nan, torch.where(a < 0, math.pi, 0.0)),
    },
    wide=torch.float64,
)
