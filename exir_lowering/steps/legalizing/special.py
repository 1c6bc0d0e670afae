"""Rules for special functions, by series, and by integrals that the trapezoidal rule finds to the last place.

All are computed in float64. Where float64 itself is left out, they are right in narrower types.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exir_lowering.steps.legalizing.registry import require, require_small, rule, widening

_POINTS = 201


def _narrow(*names: str) -> Callable[[Callable[[Tensor], Tensor]], None]:
    """Make a function of float64 the rule of operators in narrower types, of what is not NaN."""

    def add(function: Callable[[Tensor], Tensor]) -> None:
        @rule(*names)
        def _(x: Tensor) -> Any:
            require(x.dtype is not torch.float64)
            require_small(*x.shape, _POINTS)
            return widening(lambda y: torch.where(y == y, function(y), y), torch.float64)(x)

    return add


def _modified(order: int, first: bool, scaled: bool) -> Callable[[Tensor], Tensor]:
    """Return a modified function of Bessel, of the first or second kind: an integral, until nothing is left of it."""

    def function(x: Tensor) -> Tensor:
        size = torch.clamp(x.abs() if first else x, max=1e300 if scaled else 700.0)
        place = torch.arange(_POINTS, dtype=torch.float64) / (_POINTS - 1)
        ratio = 60 / torch.where(size > 0, size, 1.0)
        end = torch.log1p(ratio + torch.sqrt(ratio * (ratio + 2)))
        if first:
            end = torch.clamp(9 / torch.sqrt(size), max=math.pi)
        half = (torch.sin if first else torch.sinh)(end.unsqueeze(-1) * place / 2)
        value = torch.exp(-2 * size.unsqueeze(-1) * half * half)
        value = value * (1 + (-2 if first else 2) * half * half) if order else value
        found = torch.where((place == 0) | (place == 1), value / 2, value).sum(-1) * end / (_POINTS - 1)
        if not first:
            found = torch.where(x > 0, found, torch.where(x == 0, math.inf, math.nan))
            return found if scaled else found * torch.exp(-size)
        found = found / math.pi if scaled else found * torch.exp(size) / math.pi
        if order:
            found = torch.where(size < 1e-4, torch.exp(-size if scaled else size * 0) * size / 2, found)
        return torch.where(x < 0, -found, found) if order else found

    return function


for _order in (0, 1):
    _k = f"modified_bessel_k{_order}"
    _narrow(f"special_i{_order}e")(_modified(_order, True, True))
    _narrow(("i0", "special_i1")[_order], f"special_modified_bessel_i{_order}")(_modified(_order, True, False))
    _narrow(f"special_scaled_{_k}")(_modified(_order, False, True))
    _narrow(f"special_{_k}")(_modified(_order, False, False))


@rule("erfc", wide=torch.float64)
def _erfc(x: Tensor) -> Tensor:
    tail = _erfc_tail(torch.clamp(x.abs(), 1.0, 30.0))
    return torch.where(x.abs() < 1, 1 - torch.erf(x), torch.where(x > 0, tail, 2 - tail))


def _erfc_tail(z: Tensor, scaled: bool = False) -> Tensor:
    """Return 1 - erf from 1 on, times exp(z * z) if scaled: an integral of exp(-t * t) / (t * t + z * z), by sums."""
    step = 0.5
    total = 0.5 / (z * z)
    for k in range(1, 14):
        total = total + math.exp(-((k * step) ** 2)) / (z * z + (k * step) ** 2)
    sums, near, one = (2 * step / math.pi) * z * total, torch.clamp(z, max=6.0), torch.exp(-z * z)
    rest = 2 / (1 - torch.exp(near * (2 * math.pi / step))) * (z < 6.0)
    return sums + rest * torch.exp(near * near) if scaled else sums * one + rest


@_narrow("special_erfcx")
def _erfcx(x: Tensor) -> Tensor:
    return torch.where(x < 1, torch.exp(x * x) * _erfc(x), _erfc_tail(torch.clamp(x, 1.0, 1e150), scaled=True))


def _quantile(tail: Tensor) -> Tensor:
    """Return what a normal variable exceeds with a probability below a half: a guess, corrected twice."""
    q = torch.clamp(tail, min=1e-300)
    t = torch.sqrt(-2 * torch.log(q))
    y = t - (2.515517 + t * (0.802853 + 0.010328 * t)) / (1 + t * (1.432788 + t * (0.189269 + 0.001308 * t)))
    for _ in range(2):
        ratio = (_erfc(y / math.sqrt(2)) / 2 - q) * math.sqrt(2 * math.pi) * torch.exp(y * y / 2)
        y = y + ratio / (1 - ratio * y / 2)
    return torch.where(tail == 0, math.inf, torch.where(tail < 0, math.nan, y))


@_narrow("special_ndtri")
def _ndtri(x: Tensor) -> Tensor:
    found = _quantile(torch.minimum(x, 1 - x))
    return torch.where(x == 0.5, 0.0, torch.where(x < 0.5, -found, found))


@_narrow("erfinv")
def _erfinv(x: Tensor) -> Tensor:
    size = x.abs()
    near = size * (math.sqrt(math.pi) / 2) * (1 + math.pi / 12 * size * size)
    found = torch.where(size < 1e-4, near, _quantile((1 - size) / 2) / math.sqrt(2))
    return torch.where(x < 0, -found, found)


_BERNOULLI = [1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510]


@rule("lgamma", wide=torch.float64)
def _lgamma(x: Tensor) -> Tensor:
    found = torch.where((x == 1) | (x == 2), 0.0, _gamma(-1, x))
    return torch.where((x.abs() == math.inf) | ((x <= 0) & (x == torch.floor(x))), math.inf, found)


@rule("digamma", "special_digamma", wide=torch.float64)
def _digamma(x: Tensor) -> Tensor:
    found = torch.where((x < 0) & (x == torch.floor(x)), math.nan, _gamma(0, x))
    return torch.where(x == 0, -torch.reciprocal(x), found)


@rule("polygamma", wide=torch.float64)
def _polygamma(n: int, x: Tensor) -> Any:
    if n == 0:
        return _digamma(x)
    pole = (x <= 0) & (x == torch.floor(x))
    return torch.where(pole, (-1) ** (n + 1) * math.inf, _gamma(n, x)) if n <= 8 else NotImplemented


def _gamma(n: int, x: Tensor) -> Tensor:
    """Return a derivative of digamma, or its integral for -1: Stirling's series, which recurrence and reflection reach.

    Neither is right where there are poles.
    """
    sign, mirrored, least = (-1) ** (n + 1), x < 0.5, 8 if n < 1 else 16

    def step(y: Tensor) -> Tensor:
        return -torch.log(y) if n < 0 else y ** -(n + 1) * sign * math.factorial(n)

    positive = torch.where(mirrored, 1 - x, x)
    y = positive + least
    if n < 0:
        found = y * torch.log(y) - y + 0.5 * math.log(2 * math.pi)
    else:
        found = torch.log(y) if n == 0 else y**-n * sign * math.factorial(n - 1)
    found = found + step(y) / 2
    for k, bernoulli in enumerate(_BERNOULLI, 1):
        found = found + y ** -(2 * k + n) * (sign * bernoulli * math.factorial(2 * k + n - 1) / math.factorial(2 * k))
    for k in range(least):
        found = found + step(positive + k)
    angle = (x - torch.round(x)) * math.pi
    if n < 0:
        return torch.where(mirrored, math.log(math.pi) - torch.log(torch.sin(angle).abs()) - found, found)
    slopes = [0.0, 1.0]  # of the cotangent, as polynomials of it, the constant first
    for _ in range(n):
        first = [k * c for k, c in enumerate(slopes)][1:]
        slopes = [-(u + v) for u, v in zip([*first, 0.0, 0.0], [0.0, 0.0, *first], strict=True)]
    cotangent, slope = 1 / torch.tan(angle), torch.zeros_like(x)
    for coefficient in reversed(slopes):
        slope = slope * cotangent + coefficient
    return torch.where(mirrored, -(math.pi ** (n + 1)) * slope - sign * found, found)
