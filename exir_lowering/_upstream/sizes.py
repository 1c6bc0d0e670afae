"""Symbolic sizes: their expressions, and the names that people gave them."""

from __future__ import annotations

from typing import Any

import sympy

from exir_lowering._upstream.likeness import SYMBOLS


def expression(size: Any) -> Any:
    """Return the expression of a symbolic size, or other number; of a number, that number."""
    return size.node.expr if isinstance(size, SYMBOLS) else sympy.Integer(size)


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


def grows(size: Any) -> bool:
    """Return whether a size is a polynomial that is not smaller when its symbols are greater."""
    terms = [each for each in sympy.Add.make_args(sympy.expand(size)) if each.free_symbols]
    return bool(size.is_polynomial(*size.free_symbols)) and all(each.as_coeff_Mul()[0] > 0 for each in terms)


def smallest(size: Any, ranges: Any) -> int:
    """Return the least number that a size can be with these range constraints, 0 if that is not plain."""
    return max(1, int(ranges[size].lower) if size in ranges else 1) if size.is_Symbol else 0
