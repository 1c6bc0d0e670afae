"""The greatest value of an expression of sizes, of all that its symbols may be.

Intervals know nothing of what parts of an expression have in common: x // (x // 2) could be as large as x, and windows
of an image could be as many as its pixels, squared. Memory is planned for it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from typing import Any

import numpy as np
import sympy

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
