"""Rules for special functions, by integrals that the trapezoidal rule finds to the last place, and by their tails.

All are computed in float64 and are right in narrower types; float64 itself is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exir_lowering.steps.legalizing.arithmetic import erfc_tail, erfc_wide
from exir_lowering.steps.legalizing.registry import Rule, rule, within

_POINTS = 401
_NEAR = 32.0
"""Up to here functions of Bessel are integrals, beyond it series of powers of 1/x."""


def _narrow(*names: str) -> Callable[[Callable[[Tensor], Tensor]], Rule]:
    """Make a function of float64 the rule of some operators."""

    def add(function: Callable[[Tensor], Tensor]) -> Rule:
        def compute(x: Tensor) -> Any:
            if x.dtype is torch.float64 or not within(*x.shape, _POINTS):
                return NotImplemented
            dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
            return function(x.to(torch.float64)).to(dtype)

        rule(*(f"{name}.default" for name in names))(compute)
        return compute

    return add


def _coefficients(order: int, count: int) -> list[float]:
    """Return the coefficients of the series of functions of Bessel for large arguments."""
    found = [1.0]
    for k in range(1, count):
        found.append(found[-1] * (4 * order**2 - (2 * k - 1) ** 2) / (8 * k))
    return found


def _powers(x: Tensor, coefficients: list[float]) -> Tensor:
    found = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        found = found * x + coefficient
    return found


def _angles(count: int) -> Tensor:
    return (torch.arange(count, dtype=torch.float64) + 0.5) * (2 * math.pi / count)


def _scaled_i(x: Tensor, order: int) -> Tensor:
    """Return exp(-x) times the modified function of the first kind, of what is not negative."""
    cosine = torch.cos(_angles(48))
    integrand = torch.exp(torch.clamp(x, max=_NEAR).unsqueeze(-1) * (cosine - 1))
    near = (integrand * cosine if order else integrand).mean(-1)
    if order:
        near = torch.where(x < 1e-4, torch.exp(-x) * x / 2, near)
    inverse = 1 / torch.clamp(x, min=_NEAR)
    signed = [(-1) ** k * each for k, each in enumerate(_coefficients(order, 14))]
    return torch.where(x < _NEAR, near, torch.sqrt(inverse / (2 * math.pi)) * _powers(inverse, signed))


def _nan_kept(x: Tensor, found: Tensor) -> Tensor:
    return torch.where(x == x, found, x)


@_narrow("special_i0e")
def _i0e(x: Tensor) -> Tensor:
    return _nan_kept(x, _scaled_i(x.abs(), 0))


@_narrow("special_i1e")
def _i1e(x: Tensor) -> Tensor:
    return _nan_kept(x, torch.where(x < 0, -1.0, 1.0) * _scaled_i(x.abs(), 1))


@_narrow("i0", "special_modified_bessel_i0")
def _i0(x: Tensor) -> Tensor:
    size = torch.clamp(x.abs(), max=700.0)
    return _nan_kept(x, _scaled_i(size, 0) * torch.exp(size))


@_narrow("special_i1", "special_modified_bessel_i1")
def _i1(x: Tensor) -> Tensor:
    size = torch.clamp(x.abs(), max=700.0)
    return _nan_kept(x, torch.where(x < 0, -1.0, 1.0) * _scaled_i(size, 1) * torch.exp(size))


def _scaled_k(x: Tensor, order: int) -> Tensor:
    """Return exp(x) times the modified function of the second kind."""
    ratio = 60 / torch.where(x > 0, x, 1.0)
    end = torch.log1p(ratio + torch.sqrt(ratio * (ratio + 2))).unsqueeze(-1)  # the integrand is exp(-60) there
    place = torch.arange(_POINTS, dtype=torch.float64)
    half = torch.sinh(end * place / (2 * (_POINTS - 1)))
    value = torch.exp(-2 * x.unsqueeze(-1) * half * half)
    value = value * (1 + 2 * half * half) if order else value
    found = torch.where(place == 0, value / 2, value).sum(-1) * end.squeeze(-1) / (_POINTS - 1)
    return torch.where(x > 0, torch.where(x == math.inf, 0.0, found), torch.where(x == 0, math.inf, math.nan))


@_narrow("special_scaled_modified_bessel_k0")
def _k0e(x: Tensor) -> Tensor:
    return _scaled_k(x, 0)


@_narrow("special_scaled_modified_bessel_k1")
def _k1e(x: Tensor) -> Tensor:
    return _scaled_k(x, 1)


@_narrow("special_modified_bessel_k0")
def _k0(x: Tensor) -> Tensor:
    return _scaled_k(x, 0) * torch.exp(-x)


@_narrow("special_modified_bessel_k1")
def _k1(x: Tensor) -> Tensor:
    return _scaled_k(x, 1) * torch.exp(-x)


def _j(x: Tensor, order: int) -> Tensor:
    """Return the function of the first kind, of what is not negative."""
    sine = torch.sin(_angles(96))
    phase = torch.clamp(x, max=_NEAR).unsqueeze(-1) * sine
    near = (sine * torch.sin(phase) if order else torch.cos(phase)).mean(-1)
    near = torch.where(x < 1e-4, x / 2, near) if order else near
    far = torch.clamp(x, min=_NEAR)
    known = [(-1) ** (k // 2) * each for k, each in enumerate(_coefficients(order, 16))]
    square = 1 / (far * far)
    even, odd = _powers(square, known[::2]), _powers(square, known[1::2]) / far
    phase = far - (2 * order + 1) * math.pi / 4
    tail = torch.sqrt(2 / (math.pi * far)) * (even * torch.cos(phase) - odd * torch.sin(phase))
    return torch.where(x == math.inf, 0.0, torch.where(x < _NEAR, near, tail))


@_narrow("special_bessel_j0")
def _j0(x: Tensor) -> Tensor:
    return _nan_kept(x, _j(x.abs(), 0))


@_narrow("special_bessel_j1")
def _j1(x: Tensor) -> Tensor:
    return _nan_kept(x, torch.where(x < 0, -1.0, 1.0) * _j(x.abs(), 1))


@_narrow("special_erfcx")
def _erfcx(x: Tensor) -> Tensor:
    square = torch.exp(x * x)
    return torch.where(x < 1, square * erfc_wide(x), erfc_tail(torch.clamp(x, 1.0, 1e150), scaled=True))


def _quantile(tail: Tensor) -> Tensor:
    """Return what a normal variable exceeds with a probability below a half: a guess, corrected twice."""
    q = torch.clamp(tail, min=1e-300)
    t = torch.sqrt(-2 * torch.log(q))
    y = t - (2.515517 + t * (0.802853 + 0.010328 * t)) / (1 + t * (1.432788 + t * (0.189269 + 0.001308 * t)))
    for _ in range(2):
        ratio = (erfc_wide(y / math.sqrt(2)) / 2 - q) * math.sqrt(2 * math.pi) * torch.exp(y * y / 2)
        y = y + ratio / (1 - ratio * y / 2)
    return torch.where(tail == 0, math.inf, torch.where(tail < 0, math.nan, y))


@_narrow("special_ndtri")
def _ndtri(x: Tensor) -> Tensor:
    found = _quantile(torch.minimum(x, 1 - x))
    return _nan_kept(x, torch.where(x == 0.5, 0.0, torch.where(x < 0.5, -found, found)))


@_narrow("erfinv")
def _erfinv(x: Tensor) -> Tensor:
    size = x.abs()
    found = _quantile((1 - size) / 2) / math.sqrt(2)
    near = size * (math.sqrt(math.pi) / 2) * (1 + math.pi / 12 * size * size)
    return _nan_kept(x, torch.where(x < 0, -1.0, 1.0) * torch.where(size < 1e-4, near, found))
