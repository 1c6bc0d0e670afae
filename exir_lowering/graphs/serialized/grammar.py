"""The text in programs that torch evaluates, or makes Python code of: symbolic sizes, guards, names.

Both get only text whose syntax tree was accepted here: numbers, symbols, arithmetic, comparisons, closed functions.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from exir_lowering.errors import InputError
from exir_lowering.graphs.operators.functions import split_words


class UnsafeFileError(InputError):
    """Something in a file would or could run code when torch loads it; the message says what, as a clause."""


LONGEST = 1 << 16

PATH = re.compile(r"[^\"'\\\x00-\x1f\x7f]{0,2048}")
"""The name of a parameter, buffer or constant: it may be part of a Python string literal."""

_SYMBOL = re.compile(r"[a-z]{1,4}[0-9]{1,9}|true|false|oo|zoo|nan|int_oo|pi|E", re.ASCII)
_QUOTED = re.compile(r"[A-Za-z0-9_.+\-]{1,512}", re.ASCII)  # the name of a Symbol, the digits of a Float

# sympy's own classes, those of torch.utils._sympy.functions, and what these are in guards, which are Python.
FUNCTIONS = split_words(
    """
    Add Mul Pow Integer Rational Min Max Mod Abs floor ceiling sqrt And Or Not Eq Ne Lt Le Gt Ge Equality
    Unequality StrictLessThan StrictGreaterThan LessThan GreaterThan Piecewise ExprCondPair FloorDiv ModularIndexing
    Where PythonMod CleanDiv CeilToInt FloorToInt CeilDiv LShift RShift PowByNatural FloatPow FloatTrueDiv IntTrueDiv
    IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat Identity
    BitwiseFn_bitwise_and BitwiseFn_bitwise_or BitwiseFn_bitwise_xor
    OpaqueUnaryFn_sqrt OpaqueUnaryFn_cos OpaqueUnaryFn_cosh OpaqueUnaryFn_sin OpaqueUnaryFn_sinh OpaqueUnaryFn_tan
    OpaqueUnaryFn_tanh OpaqueUnaryFn_asin OpaqueUnaryFn_acos OpaqueUnaryFn_atan OpaqueUnaryFn_exp OpaqueUnaryFn_log
    OpaqueUnaryFn_asinh OpaqueUnaryFn_log2 min max abs int float bool round len
    """
)
_METHODS = {"size", "stride", "storage_offset", "item", "dim", "numel", "is_integer"}
_OF_MODULES = {
    "math": split_words(
        "floor ceil trunc sqrt isnan pow exp log log2 cos cosh sin sinh tan tanh asin acos atan asinh fabs"
    ),
    "torch": split_words("sym_float sym_int sym_max sym_min sym_not sym_ite _sym_sqrt"),
}
_ARITHMETIC = (
    *(ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator, ast.BoolOp, ast.boolop, ast.Compare, ast.Tuple, ast.Load),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)


def check_text(what: str, text: Any) -> str:
    """Return a size, as "Mul(Integer(2), Symbol('s0'))", or a guard, as "L['x'].size()[0] <= 8", or UnsafeFileError."""
    # Other characters are read as these by Python, or as something else by sympy; torch quotes guards with a ".
    if not isinstance(text, str) or len(text) > LONGEST or not re.fullmatch(r"[ !#-\[\]-~]*", text):
        raise UnsafeFileError(f"the {what} {str(text)[:100]!r} is unsafe: expected up to {LONGEST} plain characters")
    try:
        left: list[ast.AST] = [ast.parse(text, mode="eval").body]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnsafeFileError(f"the {what} {text[:100]!r} is unsafe: {type(error).__name__}") from None
    while left:
        node = left.pop()
        parts = list(ast.iter_child_nodes(node)) if isinstance(node, _ARITHMETIC) else _list_parts(node)
        if parts is None or isinstance(node, ast.BitXor):  # which sympy reads as a power
            raise UnsafeFileError(f"the {what} {text[:100]!r} is unsafe: it has {ast.unparse(node)[:100]!r}")
        left.extend(parts)
    return text


def _list_parts(node: ast.AST) -> list[Any] | None:
    """Return what else to check of a node; None if it is refused."""
    match node:
        case ast.Constant(value=int() | float()):
            return []
        case ast.Name(id=name) if _SYMBOL.fullmatch(name):
            return []
        case ast.Call(func=ast.Name(id="Symbol" | "Float"), args=[ast.Constant(value=str(text))], keywords=options):
            plain = all(isinstance(one.value, ast.Constant) for one in options) and _QUOTED.fullmatch(text)
            return [one.value for one in options] if plain else None
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return args
        case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name), args=args, keywords=[]) if (
            name in _OF_MODULES.get(module, ())
        ):
            return args
    return [] if _is_argument(node) else None


def _is_argument(node: ast.AST) -> bool:
    """Return whether a node is an argument's value or size: L['x']['k'][0].size()[1]."""
    match node:
        case ast.Subscript(value=inner, slice=ast.Constant(value=int() | str())):
            return _is_argument(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr=name), args=[], keywords=[]):
            return name in _METHODS and _is_argument(inner)
        case ast.Attribute(value=inner, attr=name):  # of a data class
            return not name.startswith("_") and _is_argument(inner)
    return isinstance(node, ast.Name) and node.id == "L"
