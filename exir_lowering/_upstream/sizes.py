"""Symbolic sizes: their expressions, the names that people gave them, and when they are which numbers."""

from __future__ import annotations

from typing import Any

import sympy
import torch

# Says between which numbers an expression of sizes lies.
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy


def expression(size: Any) -> Any:
    """Return the expression of a size; of a number, that number."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def names_of_symbols(shape_env: Any) -> dict[str, Any]:
    """Return the symbols by the names of the `torch.export.Dim`s that they stand for; a file does not have them."""
    names = shape_env.source_name_to_debug_name
    found = {}
    for symbol, sources in shape_env.var_to_sources.items():
        for source in sources:
            # A Dim that is only a part of other ones, such as d of 2*d, is a source of its own.
            name = names.get(source.name, source.name)
            if name.isidentifier():
                found[name] = shape_env.replacements.get(symbol, symbol)
    return {name: each for name, each in found.items() if each.is_Symbol}


def solve(size: Any, number: int) -> dict[Any, Any] | None:
    """Return the number that the one symbol of a size has when the size is a number, None if there is no such one."""
    if size.is_Symbol:
        return {size: sympy.Integer(number)}
    if len(size.free_symbols) != 1:
        return None
    (symbol,) = size.free_symbols
    try:
        found = [each for each in sympy.solve(size - number, symbol) if each.is_Integer and each > 0]
    except NotImplementedError:
        return None
    return {symbol: found[0]} if len(found) == 1 else None


def smallest(size: Any, ranges: Any) -> int:
    """Return the least number that a size can be with these range constraints, where each symbol is at least 1."""
    positive = ValueRanges(1, sympy.oo)
    known = {symbol: ranges.get(symbol, positive) & positive for symbol in size.free_symbols}
    least = bound_sympy(size, known).lower
    return int(least) if least.is_Integer else 0
