"""What torch.export assumed of sizes while it traced: eager mode checks such guards, and a file does not."""

from __future__ import annotations

import builtins
import math
import re
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering._upstream.fakes import expression, ranges_in_file, shape_env_of
from exir_lowering._upstream.programs import guards_code_of
from exir_lowering.graphs.serialized.grammar import check_text

_FEW, _MANY = 64, 1 << 13  # how many of the smallest sizes are tried, and where one fails also of the largest
_LONGEST = 4000  # characters of a guard: one can be exponentially longer than what it says

_SIZE = re.compile(r"""L((?:\[["']?\w+["']?\])+)\.size\(\)\[(\d+)\]""")  # as in L['x'].size()[1]
_FUNCTIONS = {name: getattr(builtins, name) for name in ("abs", "bool", "float", "int", "max", "min", "round")}


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
    """List guards on one size that do not hold for all; none that leaves out sizes in a row, as torch does."""
    inputs: dict[str, Any] = {node.name: node.meta.get("val") for node in graphs.user_inputs(program)}
    found: dict[tuple[str, int], AssumedSize] = {}
    for text in guards_code_of(program):
        if len(text) > _LONGEST or "**" in text or "<<" in text:  # powers could take forever; torch writes products
            continue
        try:
            ((path, number),) = set(_SIZE.findall(text))
            name, dimension = "_".join(re.findall(r"\w+", path)), int(number)
            said = _SIZE.sub("size", check_text("guard", text))
            guard = compile(said, "<guard>", "eval")
            symbol = expression(size := inputs[name].shape[dimension])
            known = ranges_in_file(shape_env_of(size))[symbol]
            sizes = range(int(known.lower), int(known.upper) + 1)
            tried = {*sizes[:_FEW], *sizes[:: len(sizes) // _FEW + 1], sizes[-1]}
            if all(_holds(guard, one) for one in tried):
                continue
            wrong = {one for one in tried.union(sizes[:_MANY], sizes[-_MANY:]) if not _holds(guard, one)}
        except (SyntaxError, NameError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue  # about several sizes, or computed by what is not known here
        if "!=" not in said or max(wrong) - min(wrong) >= len(wrong):
            before = found.get((name, dimension), AssumedSize(name, dimension, symbol, (), (), sizes))
            both = (*before.guards, said), tuple(sorted(wrong.union(before.wrong)))
            found[name, dimension] = replace(before, guards=both[0], wrong=both[1])
    return list(found.values())


def _holds(guard: CodeType, size: int) -> bool:
    """Return whether a guard, whose text was checked, holds for a size."""
    try:
        return bool(eval(guard, {"__builtins__": _FUNCTIONS, "math": math, "torch": torch}, {"size": size}))
    except ArithmeticError:  # by 0
        return False
