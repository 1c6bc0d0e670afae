"""Names in a serialised program, of which torch makes Python code later: only what is plainly a name is let through."""

from __future__ import annotations

import ast
import keyword
import re
from typing import Any

_IDENTIFIER = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]{0,511}", re.ASCII)
_ATTRIBUTE = re.compile(r"[A-Za-z0-9_]{1,512}(\.[A-Za-z0-9_]{1,512}){0,63}", re.ASCII)
_PATH = re.compile(r"[^\"'\\\x00-\x1f\x7f]{0,2048}")
_LONGEST_GUARD, _DEEPEST_GUARD = 2048, 40


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
    if not isinstance(name, str) or not _PATH.fullmatch(name):
        raise ValueError(f"{str(name)[:80]!r} is not the name of a parameter or module")
    return name


_EXPRESSIONS = (ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Name, ast.Call, ast.Subscript)
_PARTS = (*_EXPRESSIONS, ast.Attribute, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.Load)
_METHODS = {"size", "stride", "storage_offset", "dim", "numel", "item"}
_FUNCTIONS = {"Eq", "Ne", "Max", "Min", "Mod", "PythonMod", "FloorDiv", "max", "min", "abs", "int", "float", "len"}


def check_guard(text: Any) -> str:
    """Return a guard, such as "L['x'].size()[0] <= 8", which torch executes when the program becomes a module.

    ValueError: It is not made of numbers, arguments, their sizes, arithmetic and comparisons.
    """
    if not isinstance(text, str) or len(text) > _LONGEST_GUARD or not text.isascii() or not text.isprintable():
        raise ValueError(f"{str(text)[:80]!r} is not a guard")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text[:80]!r} is not a guard") from error
    _check_guard(tree, 0)
    return text


def _check_guard(node: ast.AST, depth: int) -> None:
    fine = isinstance(node, _PARTS) and depth < _DEEPEST_GUARD and not isinstance(node, (ast.Pow, ast.LShift))
    if isinstance(node, ast.Name):
        fine = node.id == "L" or node.id in _FUNCTIONS
    elif isinstance(node, ast.Attribute):
        fine = node.attr in _METHODS
    elif isinstance(node, ast.Constant):
        fine = type(node.value) in (int, float, bool) or (isinstance(node.value, str) and len(node.value) < 512)
    elif isinstance(node, ast.Call):
        fine = not node.keywords and isinstance(node.func, (ast.Name, ast.Attribute))
    if not fine:
        raise ValueError(f"a guard has {type(node).__name__} {ast.unparse(node)[:80]!r}")
    for child in ast.iter_child_nodes(node):
        _check_guard(child, depth + 1)
