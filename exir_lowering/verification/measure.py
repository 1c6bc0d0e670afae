"""How far an output is from that of eager PyTorch, and how far it may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exir_lowering.errors import InputError
from exir_lowering.lowered_module.bundled import tolerance as dtype_tolerance
from exir_lowering.runtime.inputs import show

QUANTIZED_SQNR, QUANTIZED_SHARE = 20.0, 0.04
"""Of quantised programs: the least SQNR in dB, or the largest error as a share of the output's range."""

_ROUNDING = 4.0  # how many times the error that rounding the inputs causes in PyTorch itself is taken for rounding too

_LEAST = 1e-4
"""The magnitude that an output is taken to have when it is always zero: others add up zeros to something smaller."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far outputs of a method may be from those of eager PyTorch."""

    share: float | None  # the largest error of floating-point numbers, of the output's largest magnitude
    quantized: bool  # whether a large enough SQNR will do, as values are rounded to steps on the way
    coarsest: torch.dtype

    def of(self, dtype: torch.dtype) -> float:
        """Return the share for a type: 0.0 for integers and bool, which have to be the same."""
        if not dtype.is_floating_point and not dtype.is_complex:
            return 0.0
        if self.share is not None:
            return self.share
        return max(dtype_tolerance(dtype), dtype_tolerance(self.coarsest))

    def describe(self, dtype: torch.dtype) -> str:
        """Say it in words."""
        share = self.of(dtype)
        if not share:
            return "exact"
        if self.quantized and self.share is None:
            return f"SQNR of {QUANTIZED_SQNR:g} dB, or {QUANTIZED_SHARE:.0%} of the range"
        return f"{share:g} of the largest magnitude"


@dataclass(frozen=True, slots=True)
class Difference:
    """How far an output is from that of eager PyTorch in a call."""

    score: float = 0.0  # the largest error divided by the allowed one; above 1 the output is off
    largest: float = 0.0  # the largest absolute error of finite numbers
    allowed: float = 0.0  # the largest error that is allowed
    sqnr: float = math.inf  # the signal to error ratio in dB; inf when they are equal
    cosine: float = 1.0  # of the angle between the two
    problem: str = ""  # what is wrong, where it is not the size of an error


def check_share(who: str, tolerance: Any) -> None:
    """Raise an InputError for a tolerance that is neither None nor a share of a magnitude."""
    if tolerance is not None and not (type(tolerance) in (int, float) and 0 < tolerance < math.inf):
        raise InputError(f"{who}: tolerance: got {tolerance!r}, expected a number above 0, such as 1e-3, or None.")


def measure(expected: Any, got: Any, tolerance: Tolerance, typical: float, noise: torch.Tensor | None) -> Difference:
    """Compare an output with that of eager PyTorch.

    `typical` is the magnitude of the output in other calls; `noise` is how far each element moves in PyTorch itself
    when the inputs are rounded, None where that was not tried.
    """
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        if isinstance(expected, float) and isinstance(got, (int, float)):
            return measure(torch.tensor(expected), torch.tensor(float(got)), tolerance, abs(expected), None)
        same = type(expected) is type(got) and expected == got
        return Difference() if same else Difference(math.inf, problem=f"is {show(got)}, expected {show(expected)}")
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        return Difference(math.inf, problem=f"is {show(got)}, expected {show(expected)}")
    if not expected.numel():
        return Difference()
    wide = torch.complex128 if expected.is_complex() else torch.float64
    one, two = (value.detach().to(wide).flatten() for value in (expected, got))
    problem = _misplaced(one, two)
    if problem:
        return Difference(math.inf, problem=problem)
    error = (two - one).abs()
    if not expected.dtype.is_floating_point and not expected.is_complex():  # float64 cannot tell all integers apart
        whole = [each.view(torch.int64) if each.dtype == torch.uint64 else each.long() for each in (expected, got)]
        error = error.clamp_min((whole[0] != whole[1]).flatten().double())
    finite = one.isfinite()
    moved = noise.flatten()[finite] if noise is not None and noise.numel() == finite.numel() else None
    one, two, error = one[finite], two[finite], error[finite]
    if not one.numel():
        return Difference()
    sizes, share = one.abs(), tolerance.of(expected.dtype)
    scale = max(float(sizes.max()), typical) or (_LEAST if share else 0.0)
    # Both are rounded, to numbers that far apart.
    rounded = torch.finfo(expected.dtype).eps if share and tolerance.share is None else 0.0
    excused = torch.full_like(error, (share + rounded) * scale)
    if moved is not None:  # what rounding flips in PyTorch itself is of no use to judge an integer
        excused += _ROUNDING * (float(moved.max()) if share else moved)
    largest, at = float(error.max()), int((error - excused).argmax())
    limit = float(excused[at])
    signal, wrong = float((sizes**2).sum()), float((error**2).sum())
    sqnr = math.inf if not wrong else (10 * math.log10(signal / wrong) if signal else -math.inf)
    lengths = float(sizes.norm() * two.abs().norm())
    cosine = float((one.conj() * two).sum().real) / lengths if lengths else float(not wrong)
    score = 0.0 if not largest else (float(error[at]) / limit if limit else math.inf)
    if share and tolerance.quantized and tolerance.share is None:
        limit = max(limit, QUANTIZED_SHARE * scale)
        score = min(largest / limit, 1.0) if sqnr >= QUANTIZED_SQNR else largest / limit
    return Difference(score, largest, limit, sqnr, min(cosine, 1.0))


def magnitude(value: Any) -> float:
    """Return the largest magnitude of a value's finite numbers."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return 0.0
    numbers = value.detach().to(torch.complex128 if value.is_complex() else torch.float64).abs()
    numbers = numbers[numbers.isfinite()]
    return float(numbers.max()) if numbers.numel() else 0.0


def differences(one: Sequence[Any], other: Sequence[Any]) -> list[torch.Tensor | None]:
    """Return how far each element of some outputs is from the other ones; None where they have other shapes."""
    return [
        (a.to(torch.complex128) - b.to(torch.complex128)).abs().nan_to_num(math.inf, math.inf)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape
        else None
        for a, b in zip(one, other, strict=False)
    ]


def _misplaced(expected: torch.Tensor, got: torch.Tensor) -> str:
    """Say where NaN or infinity is in one of two outputs only; "" for nowhere."""
    for name, find in (("NaN", torch.isnan), ("infinity", torch.isinf)):
        more, fewer = int((find(got) & ~find(expected)).sum()), int((find(expected) & ~find(got)).sum())
        if more or fewer:
            where = f"{name} in {more} elements where PyTorch has none" if more else ""
            lost = f"no {name} in {fewer} elements where PyTorch has it" if fewer else ""
            return f"has {' and '.join(filter(None, (where, lost)))}"
    infinite = expected.isinf()
    if not torch.equal(expected[infinite], got[infinite]):
        return "has infinity of the other sign"
    return ""
