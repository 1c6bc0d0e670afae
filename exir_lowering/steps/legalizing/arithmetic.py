"""Rules for what is done to each element, and for products and sums that the runtime has no kernels for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exir_lowering.steps.legalizing.registry import require, require_small, rule


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


@rule("div.Tensor_mode", "div.Scalar_mode", "floor_divide", "floor_divide.Scalar")
def _divide(a: Any, b: Any, *, rounding_mode: str | None = "floor") -> Any:
    a, b = _both(a, b)
    if a.is_floating_point() and rounding_mode == "floor":
        return NotImplemented
    if a.is_floating_point() or rounding_mode is None:
        return torch.trunc(a / b) if rounding_mode == "trunc" else a / b
    q = torch.div(a, b, rounding_mode="floor")
    return q if rounding_mode == "floor" else q + _apart(a - q * b, a, b).to(q.dtype)


@rule("__lshift__.Tensor", "__lshift__.Scalar", "bitwise_left_shift.Tensor", "bitwise_left_shift.Scalar_Tensor")
def _shift_left(a: Any, b: Any) -> Any:
    return _shifted(a, b, torch.bitwise_left_shift)


@rule("__rshift__.Tensor", "__rshift__.Scalar", "bitwise_right_shift.Tensor", "bitwise_right_shift.Scalar_Tensor")
def _shift_right(a: Any, b: Any) -> Any:
    return _shifted(a, b, torch.bitwise_right_shift)


def _shifted(a: Any, b: Any, shift: Any) -> Any:
    dtype = torch.result_type(a, b)
    if dtype.is_floating_point or dtype is torch.bool:
        return NotImplemented
    bits = torch.iinfo(dtype).bits
    if isinstance(b, int) and 0 <= b < bits:
        return shift(a, b)
    a, b = _both(a, b)
    if shift is torch.bitwise_left_shift:
        found, beyond = a * _power_of_two(b) * (1 + (b == 63).to(torch.int64)), 0
    else:
        found, beyond = torch.div(a.to(torch.int64), _power_of_two(b), rounding_mode="floor"), -(a < 0).to(torch.int64)
        bits = min(bits, 63)
    return torch.where((b >= 0) & (b < bits), found, beyond).to(dtype)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return integers, exactly, with 2**62 for larger ones."""
    return torch.pow(2.0, torch.clamp(exponent, 0, 62).to(torch.float64)).to(torch.int64)


@rule("clamp")
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


@rule("floor", "ceil", "trunc", "round")
def _whole(a: Tensor) -> Any:
    return NotImplemented if a.is_floating_point() else a.clone()


@rule("sign")
def _sign(a: Tensor) -> Any:
    return a.clone() if a.dtype is torch.bool else (a > 0).to(a.dtype) - (a < 0).to(a.dtype)


@rule("sum.dim_IntList")
def sum_of_one(a: Tensor, dims: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Return a tensor without dimensions itself, which the kernel does not take."""
    wide = a.dtype if a.is_floating_point() else torch.int64
    return a.to(dtype or wide, copy=True) if a.dim() == 0 else NotImplemented


@rule("exp2", wide=torch.float64)
def exp2(a: Tensor) -> Tensor:
    """Return powers of two."""
    return torch.pow(2.0, a)


@rule("signbit")
def _signbit(a: Tensor) -> Tensor:
    if not a.is_floating_point():
        return a < 0
    return (a < 0) | ((a == 0) & (torch.reciprocal(a) < 0))


@rule("copysign.Tensor", "copysign.Scalar")
def _copysign(a: Tensor, b: Any) -> Tensor:
    """The kernels leave the sign of zero in absolute values, and give a scalar tensor none."""
    dtype = torch.result_type(a, b)
    a = a.to(dtype if dtype.is_floating_point else torch.get_default_dtype())
    negative = _signbit(b) if isinstance(b, Tensor) else math.copysign(1, b) < 0
    return torch.where(_signbit(a) != negative, -a, a)


@rule("hypot", wide=torch.float64)
def _hypot(a: Tensor, b: Tensor) -> Tensor:
    large, small = torch.maximum(a.abs(), b.abs()), torch.minimum(a.abs(), b.abs())
    ratio = small / torch.where(large == 0, 1.0, large)
    return torch.where((a.abs() == math.inf) | (b.abs() == math.inf), math.inf, large * torch.sqrt(1 + ratio * ratio))


def _skipping_nan(name: str, extreme: Any) -> None:
    @rule(name)
    def _(a: Tensor, b: Tensor) -> Tensor:
        a, b = _both(a, b)
        return torch.where(a != a, b, torch.where(b != b, a, extreme(a, b)))


_skipping_nan("fmax", torch.maximum)
_skipping_nan("fmin", torch.minimum)


@rule("angle", wide=torch.float64)
def _angle(a: Tensor) -> Any:
    return torch.where(a != a, math.nan, torch.where(a < 0, math.pi, 0.0))


@rule("addbmm", wide=torch.float32)
def _addbmm(x: Tensor, one: Tensor, other: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if not x.is_floating_point():
        beta, alpha = int(beta), int(alpha)
    found = torch.bmm(one, other).sum(0) * alpha
    return (found if beta == 0 else found + x * beta).to(x.dtype)


@rule("_trilinear", wide=torch.float32)
def _trilinear(
    a: Tensor, b: Tensor, c: Tensor, expand1: Any, expand2: Any, expand3: Any, sumdim: Any, unroll_dim: int = 1
) -> Any:
    product: Any = 1
    for operand, dims in ((a, expand1), (b, expand2), (c, expand3)):
        for dim in dims:
            operand = operand.unsqueeze(dim)
        product = product * operand
    require_small(*product.shape)
    return product.sum(tuple(sumdim)) if sumdim else product


@rule("_int_mm")
def _int_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of matrices of 8-bit integers, which 32 bits hold."""
    return torch.mm(a.to(torch.int32), b.to(torch.int32))


@rule("rrelu_with_noise_functional")
def _rrelu_and_noise(a: Tensor, noise: Tensor, *args: Any) -> Any:
    return _rrelu(a, noise, *args), noise.clone()


@rule("empty_permuted")
def _empty(size: Sequence[Any], order: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return torch.zeros(size, dtype=dtype)


@rule("rrelu_with_noise")
def _rrelu(
    a: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *_: Any
) -> Any:
    require(not training)
    return torch.where(a >= 0, a, a * ((lower + upper) / 2))
