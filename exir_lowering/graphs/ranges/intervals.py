"""Ranges of numbers: the values of the analysis, and their arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.fx import Node

INF = math.inf

BOUND = 1e37
"""The magnitude up to which `ValueRanges.bounded` calls a value bounded: a thirtieth of float32's largest number."""

_EXACT = float(2**52)


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers among which every element of a value is, whatever the inputs of the program.

    Attributes:
        low: No element that is a number is less; -inf if elements may be -inf, or nothing is known.
        high: No element that is a number is greater; inf if elements may be inf, or nothing is known.
        nan: Whether elements may be NaN.
    """

    low: float
    high: float
    nan: bool

    @property
    def finite(self) -> bool:
        """Whether no element is infinite; elements may be NaN."""
        return self.low > -INF and self.high < INF

    @property
    def magnitude(self) -> float:
        """The largest magnitude of an element that is not NaN."""
        return max(abs(self.low), abs(self.high))

    @property
    def has_zero(self) -> bool:
        """Whether zero is in the range."""
        return self.low <= 0 <= self.high

    @property
    def has_infinity(self) -> bool:
        """Whether an element may be infinite."""
        return not self.finite

    def __add__(self, other: Range) -> Range:
        apart = (self.high == INF and other.low == -INF) or (self.low == -INF and other.high == INF)
        low, high = self.low + other.low, self.high + other.high  # inf + -inf: nothing is known on that side
        return Range(-INF if low != low else low, INF if high != high else high, self.nan or other.nan or apart)

    def __neg__(self) -> Range:
        return Range(-self.high, -self.low, self.nan)

    def __sub__(self, other: Range) -> Range:
        return self + -other

    def __mul__(self, other: Range) -> Range:
        undefined = (self.has_infinity and other.has_zero) or (other.has_infinity and self.has_zero)
        corners = [_product(x, y) for x in (self.low, self.high) for y in (other.low, other.high)]
        return Range(min(corners), max(corners), self.nan or other.nan or undefined)

    def __truediv__(self, other: Range) -> Range:
        if other.has_zero:
            return TOP
        product = self * Range(1 / other.high, 1 / other.low, other.nan)
        return Range(product.low, product.high, self.nan or other.nan or (self.has_infinity and other.has_infinity))


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why something could not be proven.

    Attributes:
        node: The node that is to blame.
        reason: What it does, with its source line if that is known.
        advice: What the user can do.
    """

    node: Node
    reason: str
    advice: str


TOP = Range(-INF, INF, True)
"""Nothing is known."""

BOOL = Range(0.0, 1.0, False)


@lru_cache(maxsize=64)
def whole(dtype: torch.dtype | None) -> Range:
    """Return the range of all values of a type."""
    if dtype is torch.bool:
        return BOOL
    if dtype is None or dtype.is_floating_point or dtype.is_complex:
        return TOP
    try:
        info = torch.iinfo(dtype)
    except TypeError:
        return TOP
    return Range(float(info.min), float(info.max), False)


@lru_cache(maxsize=64)
def limits(dtype: torch.dtype) -> tuple[float, float, float]:
    """Return the largest number of a floating-point type, its smallest normal one, and its precision."""
    info = torch.finfo(dtype)
    return info.max, info.tiny, info.eps


def point(value: float) -> Range:
    """Return the range of one number."""
    number = float(value)
    return TOP if math.isnan(number) else Range(number, number, False)


def symmetric(magnitude: float, nan: bool) -> Range:
    """Return the range of all numbers up to a magnitude."""
    return Range(-magnitude, magnitude, nan) if magnitude == magnitude else TOP


def union(ranges: Iterable[Range]) -> Range:
    """Return the smallest range with all given ones; of none, that of nothing known."""
    found = list(ranges)
    if not found:
        return TOP
    return Range(min(r.low for r in found), max(r.high for r in found), any(r.nan for r in found))


def meet(one: Range, other: Range) -> Range:
    """Return what two true statements about the same value say together."""
    low, high = max(one.low, other.low), min(one.high, other.high)
    return Range(low, high, one.nan and other.nan) if low <= high else one


def settle(range_: Range, dtype: torch.dtype | None) -> Range:
    """Return the range of values after they were rounded to a type.

    Rounding may move a number by a few units in the last place, flush a small one to zero and make a large one
    infinite; integers wrap around.
    """
    low, high = range_.low, range_.high
    if dtype is None or dtype.is_complex or low != low or high != high:
        return TOP
    if dtype is torch.bool:
        return BOOL if low < 0 or high > 1 or range_.nan else range_
    if not dtype.is_floating_point:
        every = whole(dtype)
        if low < every.low or high > every.high or range_.nan or max(-low, high) > _EXACT:
            return every
        return range_
    largest, tiny, precision = limits(dtype)
    return Range(_down(low, largest, tiny, 8 * precision), -_down(-high, largest, tiny, 8 * precision), range_.nan)


def _down(number: float, largest: float, tiny: float, slack: float) -> float:
    """Round a lower bound down."""
    if number == 0 or abs(number) == INF:
        return number
    number -= abs(number) * slack
    if abs(number) < tiny:
        return 0.0 if number > 0 else -tiny
    if number < -largest:
        return -INF
    return min(number, largest)


def convert(range_: Range, source: torch.dtype | None, target: torch.dtype | None) -> Range:
    """Return the range of values after a conversion to another type."""
    if source is target:
        return range_
    if source is None or target is None or source.is_complex or target.is_complex:
        return TOP if target is None or target.is_complex else whole(target)
    if target is torch.bool:
        zero = range_.low == range_.high == 0 and not range_.nan
        return range_ if zero else BOOL if range_.has_zero or range_.nan else Range(1.0, 1.0, False)
    if target.is_floating_point:
        # NaN and infinities of some eight-bit types are missing or saturate: nothing is said about these types.
        return settle(range_, target) if target.itemsize > 1 else TOP
    if range_.nan or not range_.finite:
        return whole(target)  # what a conversion of NaN or of too large a number gives is not defined
    return settle(Range(float(math.trunc(range_.low)), float(math.trunc(range_.high)), False), target)


def _product(x: float, y: float) -> float:
    return 0.0 if x == 0 or y == 0 else x * y  # 0 * inf is NaN, which is not among the numbers of a range


def total(a: Range, terms: float, dtype: torch.dtype | None) -> Range:
    """Return the range of sums of up to that many terms, added in any order in a type at least as precise as `dtype`.

    Each addition rounds, so that n terms can grow by (1 + u) ** n. Partial sums that overflow to different sides
    make NaN.
    """
    if terms != terms or terms == INF:
        return Range(0.0 if a.low >= 0 else -INF, 0.0 if a.high <= 0 else INF, a.nan or (a.low < 0 < a.high))
    exact = dtype is None or not dtype.is_floating_point
    precision = 0.0 if exact or dtype is None else limits(dtype)[2]
    growth = terms * precision
    factor = 1.0 if exact else 2.0 * math.exp(growth) if growth < 100 else INF
    low = min(0.0, _product(_product(a.low, terms), factor))
    high = max(0.0, _product(_product(a.high, terms), factor))
    settled = settle(Range(low, high, a.nan), dtype)
    overflows = settled.low == -INF and settled.high == INF
    return Range(settled.low, settled.high, settled.nan or overflows) if not exact else settled
