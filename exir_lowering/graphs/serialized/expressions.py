"""Symbolic sizes as trees of JSON: an int, the name of a symbol, a bool, or a list of a function and its arguments.

Only functions of a closed table are called, with few and small arguments: sympy simplifies what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy

from exir_lowering._upstream.serializing import int_oo, sympy_functions
from exir_lowering.errors.interrupts import let_through
from exir_lowering.graphs.serialized.container import NotSerialisableError

DEEPEST, MOST, LARGEST, STEEPEST = 24, 256, 1 << 63, 8
"""How deep an expression nests, how many parts it has, its largest number, and its largest exponent."""

ASSUMPTIONS: tuple[Mapping[str, bool], ...] = tuple(
    dict.fromkeys(names.split(), True)
    for names in ("integer positive", "integer nonnegative", "integer", "real", "real positive", "")
)
"""What torch assumes about symbols, by number."""

_OF_SYMPY = "Add Mul Pow Rational Mod floor ceiling Abs Eq Ne Lt Le Gt Ge And Or Not"
_OF_TORCH = """
    FloorDiv ModularIndexing Where PythonMod Mod CleanDiv CeilToInt FloorToInt CeilDiv Max Min FloatPow FloatTrueDiv
    IntTrueDiv TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat
"""
_FUNCTIONS: Mapping[str, Any] = {
    **{name: getattr(sympy, name) for name in _OF_SYMPY.split()},
    **{f"torch.{name}": getattr(sympy_functions, name) for name in _OF_TORCH.split()},
}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_INFINITIES = {"int_oo": int_oo, "-int_oo": -int_oo, "oo": sympy.oo, "-oo": -sympy.oo}


def write(expression: Any, symbols: dict[str, sympy.Symbol]) -> Any:
    """Write an expression, and note its symbols; NotSerialisableError if reading would not give an equal one."""
    tree = _write(expression, symbols)
    try:
        same = read(tree, symbols) == expression
    except Exception as error:
        let_through(error)
        raise NotSerialisableError(f"the size {str(expression)[:200]!r} ({error})") from error
    if not same:
        raise NotSerialisableError(f"the size {str(expression)[:200]!r}: it would be read differently")
    return tree


def _write(expression: Any, symbols: dict[str, sympy.Symbol]) -> Any:
    for name, infinity in _INFINITIES.items():
        if expression is infinity or expression == infinity:
            return [name]
    if isinstance(expression, (bool, sympy.logic.boolalg.BooleanAtom)):
        return bool(expression)
    if isinstance(expression, (int, sympy.Integer)):
        return int(expression)
    if isinstance(expression, sympy.Rational):
        return ["Rational", int(expression.p), int(expression.q)]
    if isinstance(expression, (float, sympy.Float)):
        return ["Float", repr(float(expression))]
    if isinstance(expression, sympy.Symbol):
        if symbols.setdefault(expression.name, expression) != expression:
            raise NotSerialisableError(f"two symbols have the name {expression.name!r}")
        return expression.name
    name = _NAMES.get(type(expression), "")
    if not name:
        raise NotSerialisableError(f"the size {str(expression)[:200]!r} has {type(expression).__name__}")
    return [name, *(_write(part, symbols) for part in expression.args)]


def read(tree: Any, symbols: Mapping[str, sympy.Symbol]) -> Any:
    """Read an expression; ValueError if `write` does not make it, LookupError if a symbol or function is not known."""
    return _Reader(symbols).read(tree, 0)


class _Reader:
    """Reads one expression, and counts its parts."""

    def __init__(self, symbols: Mapping[str, sympy.Symbol]) -> None:
        self._symbols, self._count = symbols, 0

    def read(self, tree: Any, depth: int) -> Any:
        self._count += 1
        if depth > DEEPEST or self._count > MOST:
            raise ValueError(f"a size of more than {MOST} parts, or that nests more than {DEEPEST} deep")
        if isinstance(tree, bool):
            return sympy.true if tree else sympy.false
        if isinstance(tree, int):
            if abs(tree) > LARGEST:
                raise ValueError("a size beyond 64 bits")
            return sympy.Integer(tree)
        if isinstance(tree, str):
            return self._symbols[tree]
        name, *parts = tree
        if name in _INFINITIES and not parts:
            return _INFINITIES[name]
        if name == "Float":
            (text,) = parts
            return sympy.Float(float(text))
        function = _FUNCTIONS[name]
        arguments = [self.read(part, depth + 1) for part in parts]
        if name in ("Pow", "torch.FloatPow"):
            _check_power(*arguments)
        return function(*arguments)


def _check_power(base: Any, exponent: Any) -> None:
    """Refuse powers of numbers, which are computed at once and may be of any size, and large exponents."""
    if base.is_number or not exponent.is_number or not abs(exponent) <= STEEPEST or base.has(sympy.Pow):
        raise ValueError("a power of a number or of a power, or with a large exponent")


def find_assumptions(symbol: sympy.Symbol) -> int:
    """Return the number of what torch assumes about a symbol; NotSerialisableError if it is something else."""
    for number, assumed in enumerate(ASSUMPTIONS):
        if sympy.Symbol(symbol.name, **assumed) == symbol:
            return number
    raise NotSerialisableError(f"the symbol {symbol.name!r} has other assumptions than torch's symbols")
