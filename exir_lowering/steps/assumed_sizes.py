"""What torch.export assumed of sizes while it traced: eager mode checks such guards, and a file does not."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering._upstream.fakes import expression, ranges_in_file, shape_env_of
from exir_lowering._upstream.programs import guards_code_of

_FIRST, _MOST = 64, 1 << 14  # how many values are tried, and how many where one fails
_LONGEST = 4000  # characters of a guard: one can be exponentially longer than what it says

_SIZE = re.compile(r"""L((?:\[["']?\w+["']?\])+)\.size\(\)\[(\d+)\]""")  # as in L['x'].size()[1]

_OPERATIONS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "max": max, "min": min, "math.trunc": math.trunc, "math.floor": math.floor, "math.ceil": math.ceil,
    "torch.sym_float": float, "torch.sym_max": max, "torch.sym_min": min,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AssumedSize:
    """Guards on a size of an input that do not hold for all sizes that a file takes."""

    input: str
    dimension: int
    symbol: Any
    guards: tuple[str, ...]  # of "size"
    wrong: tuple[int, ...]  # the sizes for which one does not hold, in ascending order
    sizes: range  # that the file takes


def list_assumed(program: ExportedProgram) -> list[AssumedSize]:
    """List guards on one size that do not hold for all; none that leaves out single sizes, as torch does 0 and 1."""
    inputs = {node.name: node.meta.get("val") for node in graphs.user_inputs(program)}
    found: dict[tuple[str, int], AssumedSize] = {}
    for text in guards_code_of(program):
        try:
            ((path, number),) = set(_SIZE.findall(text))
            name, dimension = "_".join(re.findall(r"\w+", path)), int(number)
            guard = ast.parse(said := _SIZE.sub("size", text[:_LONGEST]), mode="eval").body
            symbol = expression(size := inputs[name].shape[dimension])
            known = ranges_in_file(shape_env_of(size))[symbol]
            sizes = range(int(known.lower), int(known.upper) + 1)
            if all(_holds(guard, one) for one in [*sizes[:: len(sizes) // _FIRST + 1], sizes[-1]]):
                continue
            wrong = {one for one in sizes[-_MOST:] if not _holds(guard, one)}
        except (SyntaxError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue  # about several sizes, or computed by what is not known here
        if not (isinstance(guard, ast.Compare) and isinstance(guard.ops[0], ast.NotEq)):
            before = found.get((name, dimension), AssumedSize(name, dimension, symbol, (), (), sizes))
            both = (*before.guards, said), tuple(sorted(wrong.union(before.wrong)))
            found[name, dimension] = replace(before, guards=both[0], wrong=both[1])
    return list(found.values())


def _holds(guard: ast.AST, size: int) -> bool:
    try:
        return bool(_compute(guard, size))
    except ArithmeticError:  # by 0
        return False


def _compute(part: ast.AST, size: int) -> Any:
    """Return the value of a guard for a size; KeyError for what is not known here, as a file may have any text."""
    if isinstance(part, ast.Name) and part.id == "size":
        return size
    if isinstance(part, ast.Constant):
        return part.value
    if isinstance(part, ast.UnaryOp):
        return _OPERATIONS[type(part.op)](_compute(part.operand, size))
    if isinstance(part, ast.BinOp):
        return _OPERATIONS[type(part.op)](_compute(part.left, size), _compute(part.right, size))
    if isinstance(part, ast.Compare):
        (compare,), (right,) = part.ops, part.comparators
        return _OPERATIONS[type(compare)](_compute(part.left, size), _compute(right, size))
    if isinstance(part, ast.Call):
        return _FUNCTIONS[ast.unparse(part.func)](*(_compute(argument, size) for argument in part.args))
    raise KeyError(type(part))
