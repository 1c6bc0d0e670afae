"""The text in programs that torch evaluates, or makes Python code of: symbolic sizes, guards, names.

torch gives sizes to `sympy.sympify`, and guards to `exec`. Both get only text that was accepted here: numbers, symbols,
arithmetic, comparisons, and functions of a closed list. Of names, only what is plainly one is let through.
"""

from __future__ import annotations

import ast
import keyword
import math
import re
from collections.abc import Callable
from typing import Any

from exir_lowering.errors import InputError
from exir_lowering.graphs.operators.functions import split_words


class UnsafeFileError(InputError):
    """Something in a file would or could run code when torch loads it; the message says what, as a clause."""


class ExcessiveFileError(UnsafeFileError):
    """A file would take much more memory or time than its size says; the message says what, as a clause."""


LONGEST, DEEPEST, MOST, MOST_TERMS = 1 << 16, 100, 5_000, 5_000
"""The limits of a text: its characters, how deep it nests, how many parts it has, how many when multiplied out."""

_LARGEST, _LARGEST_EXPONENT = 2**64, 64
_SHORT_SYMBOL = re.compile(r"[a-z]{1,4}[0-9]{1,9}", re.ASCII)
_SYMBOL = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}", re.ASCII)

_IDENTIFIER = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]{0,511}", re.ASCII)
_ATTRIBUTE = re.compile(r"[A-Za-z0-9_]{1,512}(\.[A-Za-z0-9_]{1,512}){0,63}", re.ASCII)
PATH = re.compile(r"[^\"'\\\x00-\x1f\x7f]{0,2048}")
"""The name of a parameter, buffer or constant: it may be part of a Python string literal."""

_KEY = re.compile(r"[^\"'\\]{1,512}")
_FLOAT = re.compile(r"[-+]?([0-9]{1,400}(\.[0-9]{0,400})?|\.[0-9]{1,400})(e[-+]?[0-9]{1,3})?", re.ASCII)

# What torch's symbolic sizes are made of: sympy's own classes, and those of torch.utils._sympy.functions.
FUNCTIONS = split_words(
    """
    Add Mul Pow Integer Float Rational Min Max Mod Abs floor ceiling sqrt And Or Not Eq Ne Lt Le Gt Ge Equality
    Unequality StrictLessThan StrictGreaterThan LessThan GreaterThan Piecewise ExprCondPair FloorDiv ModularIndexing
    Where PythonMod CleanDiv CeilToInt FloorToInt CeilDiv LShift RShift PowByNatural FloatPow FloatTrueDiv IntTrueDiv
    IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat Identity
    BitwiseFn_bitwise_and BitwiseFn_bitwise_or BitwiseFn_bitwise_xor
    OpaqueUnaryFn_sqrt OpaqueUnaryFn_cos OpaqueUnaryFn_cosh OpaqueUnaryFn_sin OpaqueUnaryFn_sinh OpaqueUnaryFn_tan
    OpaqueUnaryFn_tanh OpaqueUnaryFn_asin OpaqueUnaryFn_acos OpaqueUnaryFn_atan OpaqueUnaryFn_exp OpaqueUnaryFn_log
    OpaqueUnaryFn_asinh OpaqueUnaryFn_log2
    """
)
_POWERS = {"Pow", "PowByNatural", "FloatPow", "LShift"}
_CONSTANTS = {"true", "false", "oo", "zoo", "nan", "int_oo", "pi", "E"}
_ASSUMPTIONS = {"positive", "nonnegative", "negative", "nonpositive", "zero", "nonzero", "integer", "real", "finite"}
_ASSUMPTIONS |= {"even", "odd", "rational", "infinite", "commutative", "complex", "extended_real"}

# What guards call beside functions of sizes, which are printed as Python.
_GUARD_FUNCTIONS = FUNCTIONS | {"min", "max", "abs", "int", "float", "bool", "round", "len"}
_GUARD_METHODS = {"size", "stride", "storage_offset", "item", "dim", "numel", "is_integer"}
_MATH = {"floor", "ceil", "trunc", "sqrt", "isnan", "inf", "pow", "exp", "log", "log2", "cos", "cosh", "sin", "sinh"}
_MATH |= {"tan", "tanh", "asin", "acos", "atan", "asinh", "fabs", "nan"}
_TORCH = {"sym_float", "sym_int", "sym_max", "sym_min", "sym_not", "sym_ite", "_sym_sqrt"}

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.LShift, ast.RShift)
_LOGIC = (ast.BitAnd, ast.BitOr)  # sympy reads ^ as a power
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def check_identifier(name: Any) -> str:
    """Return a name that Python code may have, of a node or of an argument; ValueError if it is none."""
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name) or keyword.iskeyword(name):
        raise ValueError(f"{str(name)[:80]!r} is not the name of a node or argument")
    return name


def check_attribute(name: Any) -> str:
    """Return the name of a graph's attribute, such as "sub_mod.weight"; ValueError if it is none."""
    if not isinstance(name, str) or not _ATTRIBUTE.fullmatch(name) or "__" in (name[:2], name[-2:]):
        raise ValueError(f"{str(name)[:80]!r} is not the name of an attribute")
    return name


def check_path(name: Any) -> str:
    """Return a name of a parameter, buffer, constant or module, fit for string literals; ValueError if it is none."""
    if not isinstance(name, str) or not PATH.fullmatch(name):
        raise ValueError(f"{str(name)[:80]!r} is not the name of a parameter or module")
    return name


def is_symbol(name: str) -> bool:
    """Return whether a text is the name of a symbol, such as s0."""
    return _SYMBOL.fullmatch(name) is not None and not keyword.iskeyword(name)


def check_expression(text: str) -> None:
    """Raise UnsafeFileError unless a text is a size, as "Mul(Integer(2), Symbol('s0'))"; or ExcessiveFileError."""
    _Checker("symbolic expression", text, _check_expression_call, names=True).check()


def check_guard(text: str) -> str:
    """Return a guard, such as "L['x'].size()[0] <= 8"; UnsafeFileError unless of sizes, arithmetic and comparisons."""
    _Checker("guard", text, _check_guard_call, names=False).check()
    return text


class _Checker:
    """Walks the syntax tree of one text."""

    def __init__(self, what: str, text: str, call: Callable[[_Checker, ast.Call, int], None], names: bool) -> None:
        self.what, self.text, self._call, self._names = what, text, call, names
        self._count = 0

    def check(self) -> None:
        if len(self.text) > LONGEST:
            raise UnsafeFileError(f"a {self.what} of {len(self.text)} characters; torch writes at most {LONGEST}")
        # Other characters are read as these by Python, or as something else by sympy.
        if not self.text.isascii() or not self.text.isprintable():
            raise self.refuse("it has characters that are not ASCII")
        try:
            tree = ast.parse(self.text, mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self.refuse(f"it cannot be parsed ({type(error).__name__})") from None
        self.visit(tree.body, 0)
        if self._names:  # guards are computed with numbers
            self._count_terms(tree.body)

    def refuse(self, why: str) -> UnsafeFileError:
        return UnsafeFileError(f"the {self.what} {show(self.text)} is unsafe: {why}")

    def visit(self, node: ast.expr, depth: int) -> None:
        self._count += 1
        if depth > DEEPEST or self._count > MOST:
            raise self.refuse(f"it has more than {MOST} parts, or is nested more than {DEEPEST} levels deep")
        for child in self._children(node, depth):
            self.visit(child, depth + 1)

    def _children(self, node: ast.expr, depth: int) -> list[ast.expr]:
        """Check one node, and return the parts of it that are to be checked too."""
        if isinstance(node, ast.Constant):
            self._check_number(node)
            return []
        if isinstance(node, ast.Name):
            if not self._names or not (node.id in _CONSTANTS or _SHORT_SYMBOL.fullmatch(node.id)):
                raise self.refuse(f"it names {node.id!r}")
            return []
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd, ast.Not, ast.Invert)):
            return [node.operand]
        if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS + _LOGIC):
            if isinstance(node.op, (ast.Pow, ast.LShift)):
                self.check_power(node.left, node.right)
            return [node.left, node.right]
        if isinstance(node, ast.BoolOp):
            return node.values
        if isinstance(node, ast.Compare) and all(isinstance(op, _COMPARISONS) for op in node.ops):
            return [node.left, *node.comparators]
        if isinstance(node, ast.Tuple):  # of a Piecewise
            return node.elts
        if not self._names and _is_argument(node):
            return []
        if isinstance(node, ast.Call):
            self._call(self, node, depth)
            return []
        raise self.refuse(f"it has {_shorten(node)}")

    def _count_terms(self, node: ast.AST) -> float:
        """Return how many terms a part has when it is multiplied out, which torch does."""
        name = _name_callee(node) if isinstance(node, ast.Call) else ""
        operator = type(node.op) if isinstance(node, ast.BinOp) else None
        parts = [*map(self._count_terms, ast.iter_child_nodes(node))]
        if name == "Add" or operator in (ast.Add, ast.Sub):
            terms = sum(parts[1:] if name else (parts[0], parts[2]))
        elif name == "Mul" or operator is ast.Mult:
            terms = math.prod(parts)
        elif len(parts) > 1 and (name in _POWERS or operator is ast.Pow):
            exponent = node.args[1:2] if name else [node.right]  # type: ignore[attr-defined]
            fixed = _read_literal(exponent[0]) if exponent else None
            terms = parts[1 if name else 0] ** max(abs(fixed or 1), 1)
        else:
            terms = 1
        if terms > MOST_TERMS:
            raise ExcessiveFileError(
                f"the {self.what} {show(self.text)} is refused: it has more than {MOST_TERMS} terms when it is "
                "multiplied out"
            )
        return terms

    def _check_number(self, node: ast.Constant) -> None:
        if not isinstance(node.value, (int, float)) or not abs(node.value) <= _LARGEST:
            raise self.refuse(f"it has {_shorten(node)}")

    def check_power(self, base: ast.expr, exponent: ast.expr) -> None:
        """Refuse powers of numbers, which are computed at once and may be of any size, and large exponents."""
        fixed = _read_literal(exponent)
        if (fixed is None and not _has_symbol(exponent)) or (_read_literal(base) is None and not _has_symbol(base)):
            raise self.refuse("it has a power of numbers")
        if fixed is not None and abs(fixed) * _find_degree(base) > _LARGEST_EXPONENT:
            raise self.refuse(f"it has an exponent above {_LARGEST_EXPONENT}")


def _check_expression_call(checker: _Checker, node: ast.Call, depth: int) -> None:
    name = _name_callee(node)
    if name in ("Symbol", "Float"):
        _check_atom(checker, name, node)
        return
    if name not in FUNCTIONS or node.keywords:
        raise checker.refuse(f"it calls {ast.unparse(node.func)}")
    if name in _POWERS and len(node.args) >= 2:
        checker.check_power(node.args[0], node.args[1])
    for argument in node.args:
        checker.visit(argument, depth + 1)


def _check_atom(checker: _Checker, name: str, node: ast.Call) -> None:
    """Check Symbol('s0', integer=True) or Float('1.5', precision=53)."""
    (text,) = node.args if len(node.args) == 1 else (None,)
    value = text.value if isinstance(text, ast.Constant) else None
    options = {one.arg: one.value.value for one in node.keywords if isinstance(one.value, ast.Constant)}
    if name == "Symbol":
        plain = isinstance(value, str) and is_symbol(value)
        plain &= all(key in _ASSUMPTIONS and type(one) is bool for key, one in options.items())
    else:
        plain = isinstance(value, str) and _FLOAT.fullmatch(value) is not None
        plain &= all(key == "precision" and type(one) is int and 0 < one <= 1024 for key, one in options.items())
    if not plain or len(options) != len(node.keywords):
        raise checker.refuse(f"it has {ast.unparse(node)}")


def _check_guard_call(checker: _Checker, node: ast.Call, depth: int) -> None:
    function = node.func
    if isinstance(function, ast.Name):
        known = function.id in _GUARD_FUNCTIONS
    elif isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        known = function.attr in {"math": _MATH, "torch": _TORCH}.get(function.value.id, ())
    else:
        known = False
    if not known or node.keywords:
        raise checker.refuse(f"it calls {ast.unparse(function)}")
    for argument in node.args:
        checker.visit(argument, depth + 1)


def _is_argument(node: ast.expr) -> bool:
    """Return whether a node is an argument's value or size: L['x']['k'][0].size()[1]."""
    while True:
        if isinstance(node, ast.Name):
            return node.id == "L"
        if isinstance(node, ast.Subscript):
            index = node.slice
            if not isinstance(index, ast.Constant) or type(index.value) not in (int, str):
                return False
            if isinstance(index.value, str) and not _KEY.fullmatch(index.value):
                return False
            node = node.value
        elif isinstance(node, ast.Call) and not node.args and not node.keywords:
            if not isinstance(node.func, ast.Attribute) or node.func.attr not in _GUARD_METHODS:
                return False
            node = node.func.value
        else:
            # An attribute of a data class.
            if not isinstance(node, ast.Attribute) or node.attr.startswith("_"):
                return False
            node = node.value


def _read_literal(node: ast.expr) -> float | None:
    """Return the number that a node is, None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _read_literal(node.operand)
        return None if value is None else (-value if isinstance(node.op, ast.USub) else value)
    if isinstance(node, ast.Call):
        # A fraction is at most its numerator.
        known = _name_callee(node) in ("Integer", "Rational", "Float") and node.args
        return _read_literal(node.args[0]) if known else None
    constant = node.value if isinstance(node, ast.Constant) else None
    if isinstance(constant, str):  # in a Float
        return float(constant) if _FLOAT.fullmatch(constant) else None
    return constant if isinstance(constant, (int, float)) else None


def _find_degree(node: ast.AST) -> float:
    """Return the largest power in a node, with powers of powers multiplied."""
    inner = max(map(_find_degree, ast.iter_child_nodes(node)), default=1.0)
    exponent: ast.expr | None = None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        exponent = node.right
    elif isinstance(node, ast.Call) and _name_callee(node) in _POWERS and len(node.args) >= 2:
        exponent = node.args[1]
    fixed = None if exponent is None else _read_literal(exponent)
    return inner if fixed is None else inner * max(abs(fixed), 1.0)


def _name_callee(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _has_symbol(node: ast.expr) -> bool:
    return any(
        (isinstance(one, ast.Name) and one.id not in FUNCTIONS | _CONSTANTS) or isinstance(one, ast.Subscript)
        for one in ast.walk(node)
    )


def show(text: str) -> str:
    """Return a text, or its beginning, for a message."""
    return repr(text if len(text) <= 120 else f"{text[:117]}...")


def _shorten(node: ast.expr) -> str:
    text = ast.unparse(node)
    return f"{text[:57]}..." if len(text) > 60 else text
