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


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers among which every element of a value is that is not NaN, whatever the inputs of the program.

    Attributes:
        low: No element is less; -inf if elements may be -inf, or nothing is known.
        high: No element is greater; inf if elements may be inf, or nothing is known.
    """

    low: float
    high: float

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

    def __add__(self, other: Range) -> Range:
        low, high = self.low + other.low, self.high + other.high  # inf + -inf: nothing is known on that side
        return Range(-INF if low != low else low, INF if high != high else high)

    def __neg__(self) -> Range:
        return Range(-self.high, -self.low)

    def __sub__(self, other: Range) -> Range:
        return self + -other

    def __mul__(self, other: Range) -> Range:
        # 0 * inf is NaN, which is not among the numbers of a range.
        ends = [0.0 if x == 0 or y == 0 else x * y for x in (self.low, self.high) for y in (other.low, other.high)]
        return Range(min(ends), max(ends))

    def __truediv__(self, other: Range) -> Range:
        return TOP if other.has_zero else self * Range(1 / other.high, 1 / other.low)


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


TOP = Range(-INF, INF)
"""Nothing is known."""


@lru_cache(maxsize=64)
def whole(dtype: torch.dtype | None) -> Range:
    """Return the range of all values of a type."""
    if dtype is torch.bool:
        return Range(0.0, 1.0)
    if dtype is None or dtype.is_floating_point or dtype.is_complex:
        return TOP
    try:
        info = torch.iinfo(dtype)
    except TypeError:
        return TOP
    return Range(float(info.min), float(info.max))


@lru_cache(maxsize=64)
def limits(dtype: torch.dtype) -> tuple[float, float, float]:
    """Return the largest number of a floating-point type, its smallest normal one, and its precision."""
    info = torch.finfo(dtype)
    return info.max, info.tiny, info.eps


def union(ranges: Iterable[Range]) -> Range:
    """Return the smallest range with all given ones."""
    found = list(ranges)
    return Range(min(each.low for each in found), max(each.high for each in found))


def settle(found: Range, dtype: torch.dtype | None) -> Range:
    """Return the range of values after they were rounded to a type.

    Rounding may move a number by a few units in the last place, flush a small one to zero and make a large one
    infinite; integers wrap around.
    """
    low, high = found.low, found.high
    if dtype is None or dtype.is_complex or low != low or high != high:
        return TOP
    if not dtype.is_floating_point:
        every = whole(dtype)
        return every if low < every.low or high > every.high or found.magnitude > 2.0**52 else found
    return Range(_down(low, dtype), -_down(-high, dtype))


def _down(number: float, dtype: torch.dtype) -> float:
    """Round a lower bound down."""
    if number == 0 or abs(number) == INF:
        return number
    largest, tiny, precision = limits(dtype)
    number -= abs(number) * 8 * precision
    if abs(number) < tiny:
        return 0.0 if number > 0 else -tiny
    return -INF if number < -largest else min(number, largest)


def convert(found: Range, source: torch.dtype | None, target: torch.dtype | None) -> Range:
    """Return the range of values after a conversion to another type."""
    if source is target:
        return found
    if source is None or target is None or source.is_complex or target.is_complex:
        return whole(target)
    if target.is_floating_point:
        # NaN and infinities of some eight-bit types are missing or saturate: nothing is said about these types.
        return settle(found, target) if target.itemsize > 1 else TOP
    if source.is_floating_point or target is torch.bool:
        return whole(target)  # what a conversion of NaN or of too large a number gives is not defined
    return settle(found, target)


def total(found: Range, terms: float, dtype: torch.dtype | None) -> Range:
    """Return the range of sums of up to that many terms, in any order: each addition rounds, as (1 + u) ** n."""
    growth = terms * limits(dtype)[2] if dtype is not None and dtype.is_floating_point else 0.0
    factor = terms * 2.0 * math.exp(growth) if growth < 100 else INF
    summed = found * Range(factor, factor)
    return settle(Range(min(0.0, summed.low), max(0.0, summed.high)), dtype)
