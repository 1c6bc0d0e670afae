"""The greatest value of an expression of sizes, of all that its symbols may be.

Intervals know nothing of what parts of an expression have in common: x // (x // 2) could be as large as x, and windows
of an image could be as many as its pixels, squared. Memory is planned for it.

Where products of symbols are limited, boxes cover the values that are left: the greatest of any box counts.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, reduce
from typing import Any, TypeAlias

import numpy as np
import sympy
from torch.utils._sympy.value_ranges import (  # what sizes can be; no public name
    ValueRangeError,
    ValueRanges,
    bound_sympy,
)

_MOST = 1 << 18  # for how many values of the symbols an expression is computed

_LARGEST = 2.0**48
_PRODUCTS: Mapping[str, Callable[..., float]] = {
    "Mul": math.prod,
    **dict.fromkeys(("Pow", "PowByNatural"), lambda pair: math.pow(*pair)),
}
_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "Add": lambda *terms: reduce(operator.add, terms),
    "Mul": lambda *factors: reduce(operator.mul, factors),
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    **dict.fromkeys(("Pow", "PowByNatural"), operator.pow),
    "Max": lambda *values: reduce(np.maximum, values),
    "Min": lambda *values: reduce(np.minimum, values),
}


def greatest(expression: Any, ranges: Mapping[Any, Any]) -> int | None:
    """Return the greatest value of an expression; None if it has too many, or what intervals say is exact."""
    symbols = sorted(expression.free_symbols, key=str)
    limits = [(ranges[symbol].lower, ranges[symbol].upper) for symbol in symbols if symbol in ranges]
    finite = all(isinstance(limit, sympy.Integer) for pair in limits for limit in pair)
    if not symbols or len(limits) < len(symbols) or not finite:
        return None
    return _greatest(expression, tuple(symbols), tuple((int(low), int(high)) for low, high in limits))


@lru_cache(maxsize=4096)
def _greatest(expression: Any, symbols: tuple[Any, ...], limits: tuple[tuple[int, int], ...]) -> int | None:
    counts = [high - low + 1 for low, high in limits]
    if _grows(expression) or np.prod(counts, dtype=object) > _MOST:
        return None
    axes = [np.arange(low, high + 1, dtype=np.int64) for low, high in limits]
    known = dict(zip(symbols, np.meshgrid(*axes, indexing="ij", sparse=True), strict=True))

    def compute(part: Any) -> Any:
        if part not in known:
            name, values = part.func.__name__, [*map(compute, part.args)]
            if name.endswith(("Div", "Mod")) and not np.all(values[1]):
                raise ZeroDivisionError
            largest = [float(np.max(np.abs(value))) for value in values]
            if name in _PRODUCTS and _PRODUCTS[name](largest) > _LARGEST:
                raise OverflowError
            known[part] = int(part) if part.is_Integer else _OPERATIONS[name](*values)
        return known[part]

    try:
        return int(np.max(compute(expression)))
    except (KeyError, ValueError, ZeroDivisionError, OverflowError):  # another operation, or not in 64 bits
        return None


def _grows(expression: Any) -> bool:
    """Return whether it is a sum of products of positive numbers and symbols, for which intervals are exact."""
    if expression.is_Add or expression.is_Mul:
        return all(map(_grows, expression.args))
    return bool(expression.is_Symbol or (expression.is_Integer and expression > 0))


# -- what was declared of several symbols ------------------------------------------------------------------------------

Products: TypeAlias = tuple[tuple[tuple[Any, ...], int], ...]
"""Symbols, and what their product is at most."""

Limits: TypeAlias = tuple[Products, ...]
"""What holds for the sizes of an input: the products of one of these."""

_PIECES = (1, 64, 24)  # into how many pieces a range is cut where none, one or two of them are; 8 for more


def largest_shape(
    sizes: Sequence[Any], upper: Sequence[int], ranges: Mapping[Any, Any], limits: Limits, most: int
) -> list[int]:
    """Return a shape of as many elements as any of these sizes has, or a few more; `upper` and `most` are known."""
    named = set().union(*(size.free_symbols for size in sizes), *(one for each in limits for one, _ in each))
    known = tuple((symbol, from_one(ranges[symbol])) for symbol in sorted(named, key=str))
    elements, largest = _largest(tuple(sizes), tuple(upper), known, limits or ((),))
    elements, shape = min(elements, most), list(largest)
    dynamic = [dim for dim, size in enumerate(sizes) if size.free_symbols]
    for dim in sorted(dynamic, key=lambda dim: -shape[dim]):  # the largest of them has what the others leave
        rest = math.prod(shape[:dim] + shape[dim + 1 :])
        shape[dim] = min(shape[dim], -(-elements // rest) if rest else shape[dim])
        if shape[dim] > 1:
            break
    return shape


@lru_cache(maxsize=4096)
def _largest(
    sizes: tuple[Any, ...], upper: tuple[int, ...], ranges: tuple[tuple[Any, Any], ...], limits: Limits
) -> tuple[int, list[int]]:
    """Return how many elements a tensor has at most, and its sizes there."""
    total, found = sympy.Mul(*sizes), (-1, [*upper])
    for boxes in (_cover(products, dict(ranges)) for products in limits):
        for box in boxes:
            shape = [_above(size, box, len(boxes), bound) for size, bound in zip(sizes, upper, strict=True)]
            found = max(found, (_above(total, box, len(boxes), math.prod(shape)), shape))
    return found


def _above(expression: Any, box: Mapping[Any, Any], boxes: int, bound: int) -> int:
    """Return what an expression is at most in one of some boxes, and no more than a bound."""
    exact = greatest(expression, box) if boxes == 1 else None
    return int(min(bound_sympy(expression, dict(box)).upper if exact is None else exact, bound))


def _cover(products: Products, ranges: Mapping[Any, Any]) -> list[dict[Any, Any]]:
    """Return ranges that have, all together, the values of symbols with these products."""
    joined = sorted({one for symbols, _ in products if len(set(symbols)) > 1 for one in symbols}, key=str)
    whole, split = restrict(products, ranges), joined[:-1]  # the last one has what is left
    count = _PIECES[len(split)] if len(split) < len(_PIECES) else 8
    cuts = [_cuts(int(whole[one].lower), int(whole[one].upper), count) for one in split]
    boxes = []
    for corner in itertools.product(*map(itertools.pairwise, cuts)):
        piece = {one: ValueRanges(low, after - 1) for one, (low, after) in zip(split, corner, strict=True)}
        with suppress(ValueRangeError):  # it has none
            boxes.append(restrict(products, {**whole, **piece}))
    return boxes


def restrict(products: Products, ranges: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the ranges of symbols whose products are limited: each for the least values of the others."""
    found = dict(ranges)
    for symbols, most in products:
        for symbol in symbols:
            rest = math.prod(max(int(found[other].lower), 1) for other in symbols if other != symbol)
            root, _ = sympy.integer_nthroot(most // rest, symbols.count(symbol))
            found[symbol] = ValueRanges(found[symbol].lower, min(found[symbol].upper, root))
    return found


def from_one(known: Any) -> Any:
    """Return the range of a symbol; torch.export has a least size of 2 for what may be 1."""
    return ValueRanges(1, known.upper) if known.lower == 2 else known


def _cuts(low: int, high: int, count: int) -> list[int]:
    """Return where pieces of a range begin, and the end behind the last: with ends in about the same ratio."""
    if high - low < count:
        return [*range(low, high + 2)]
    return sorted({low, *map(round, np.geomspace(max(low, 1), high, count).tolist()), high + 1})
