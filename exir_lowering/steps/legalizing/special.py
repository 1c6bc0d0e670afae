"""Rules for special functions in float64, by series and integrals that the trapezoidal rule finds to the last place."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from exir_lowering.steps.legalizing.registry import require, require_small, rules

_POINTS = 201  # where an integral takes its function


def _narrow(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute a function of what is neither NaN nor float64."""
    require(x.dtype is not torch.float64)
    require_small(*x.shape, _POINTS)
    x = x.to(torch.float64)
    return torch.where(x == x, function(x), x)


def _bessel(order: int, first: bool, scaled: bool, x: Tensor) -> Tensor:
    """Return a modified function of Bessel, of the first or second kind: an integral, until nothing is left of it."""
    size = torch.clamp(x.abs() if first else x, max=1e300 if scaled else 700.0)
    place = torch.arange(_POINTS, dtype=torch.float64) / (_POINTS - 1)
    if first:
        end = torch.clamp(9 / torch.sqrt(size), max=math.pi)
    else:
        ratio = 60 / torch.where(size > 0, size, 1.0)
        end = torch.log1p(ratio + torch.sqrt(ratio * (ratio + 2)))
    half = (torch.sin if first else torch.sinh)(end.unsqueeze(-1) * place / 2)
    value = torch.exp(-2 * size.unsqueeze(-1) * half * half)
    value = value * (1 + (-2 if first else 2) * half * half) if order else value
    found = torch.where((place == 0) | (place == 1), value / 2, value).sum(-1) * end / (_POINTS - 1)
    if not first:
        found = torch.where(x > 0, found, torch.where(x == 0, math.inf, math.nan))
        return found if scaled else found * torch.exp(-size)
    found = found / math.pi if scaled else found * torch.exp(size) / math.pi
    if not order:
        return found
    found = torch.where(size < 1e-4, torch.exp(-size if scaled else size * 0) * size / 2, found)
    return torch.where(x < 0, -found, found)


def _erfc(x: Tensor) -> Tensor:
    tail = _erfc_tail(torch.clamp(x.abs(), 1.0, 30.0))
    return torch.where(x.abs() < 1, 1 - torch.erf(x), torch.where(x > 0, tail, 2 - tail))


def _erfc_tail(z: Tensor, scaled: bool = False) -> Tensor:
    """Return 1 - erf from 1 on, times exp(z * z) if scaled: an integral of exp(-t * t) / (t * t + z * z), as a sum."""
    step, near = 0.5, torch.clamp(z, max=6.0)
    total = 0.5 / (z * z)
    for k in range(1, 14):
        total = total + math.exp(-((k * step) ** 2)) / (z * z + (k * step) ** 2)
    total = (2 * step / math.pi) * z * total
    rest = 2 / (1 - torch.exp(near * (2 * math.pi / step))) * (z < 6.0)
    return total + rest * torch.exp(near * near) if scaled else total * torch.exp(-z * z) + rest


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


def _ndtri(x: Tensor) -> Tensor:
    found = _quantile(torch.minimum(x, 1 - x))
    return torch.where(x == 0.5, 0.0, torch.where(x < 0.5, -found, found))


def _erfinv(x: Tensor) -> Tensor:
    size = x.abs()
    near = size * (math.sqrt(math.pi) / 2) * (1 + math.pi / 12 * size * size)
    found = torch.where(size < 1e-4, near, _quantile((1 - size) / 2) / math.sqrt(2))
    return torch.where(x < 0, -found, found)


def _lgamma(x: Tensor) -> Tensor:
    found = torch.where((x == 1) | (x == 2), 0.0, _gamma(-1, x))
    return torch.where((x.abs() == math.inf) | ((x <= 0) & (x == torch.floor(x))), math.inf, found)


def _polygamma(n: int, x: Tensor) -> Any:
    require(n <= 8)
    found, whole = _gamma(n, x), x == torch.floor(x)
    if n == 0:
        return torch.where(x == 0, -torch.reciprocal(x), torch.where((x < 0) & whole, math.nan, found))
    return torch.where((x <= 0) & whole, (-1) ** (n + 1) * math.inf, found)


_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)


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


_BESSEL = {  # order, of the first kind, scaled
    "i0 special_modified_bessel_i0": (0, True, False),
    "special_i1 special_modified_bessel_i1": (1, True, False),
    "special_i0e": (0, True, True),
    "special_i1e": (1, True, True),
    "special_modified_bessel_k0": (0, False, False),
    "special_modified_bessel_k1": (1, False, False),
    "special_scaled_modified_bessel_k0": (0, False, True),
    "special_scaled_modified_bessel_k1": (1, False, True),
}

rules({names: partial(_narrow, partial(_bessel, *which)) for names, which in _BESSEL.items()})
rules(
    {
        "special_erfcx": partial(_narrow, _erfcx),
        "special_ndtri": partial(_narrow, _ndtri),
        "erfinv": partial(_narrow, _erfinv),
    }
)
rules(
    {"erfc": _erfc, "lgamma": _lgamma, "digamma": lambda x: _polygamma(0, x), "polygamma": _polygamma},
    wide=torch.float64,
)
