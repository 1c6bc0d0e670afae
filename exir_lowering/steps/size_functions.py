"""Functions of sizes that a file has no instruction for, or another one, in terms of those that it has.

`torch.sym_sum` is several additions, a whole power several multiplications, and the largest whole number below x is
-ceil(-x). ExecuTorch's passes do not trace the first one, so this comes before a conversion; decompositions make them
too, so it comes again before a file is made. The remainder in a file has the sign of the dividend: where that may be
negative, it is that of itself and the divisor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.edge import SIZE_FUNCTIONS
from exir_lowering._upstream.fakes import expression, shape_env_of
from exir_lowering._upstream.programs import bounds_of
from exir_lowering.graphs.inlining import insert_call

_Call = Callable[..., Any]

_MOST = 16  # how large an exponent may be


def _raise(call: _Call, base: Any, exponent: Any) -> Any:
    if type(exponent) is not int or not 0 < exponent <= _MOST:
        return None
    return reduce(lambda product, factor: call(operator.mul, product, factor), [base] * exponent)


def _remainder(call: _Call, dividend: Any, divisor: Any) -> Any:
    values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in (dividend, divisor)]
    ranges = {
        symbol: known for one in values if (env := shape_env_of(one)) for symbol, known in env.var_to_range.items()
    }
    if all(bounds_of(expression(one), ranges).lower >= 0 for one in values):
        return None
    return call(operator.mod, call(operator.add, call(operator.mod, dividend, divisor), divisor), divisor)


SPELLED: Mapping[Any, _Call] = {
    torch.sym_sum: lambda call, terms: reduce(lambda total, term: call(operator.add, total, term), terms),
    operator.pow: _raise,
    math.floor: lambda call, x: call(operator.neg, call(math.ceil, call(operator.neg, x))),
}

IN_FILES: Mapping[Any, _Call] = {**SPELLED, operator.mod: _remainder}
"""Those whose results are others in a file, too."""

_OF_WHOLE_NUMBERS = (operator.mod, torch.sym_max, torch.sym_min)
# `emit` joins truths itself.
_JOINING, _KNOWN = (operator.and_, operator.or_, operator.xor), {operator.getitem, operator.ne, *SIZE_FUNCTIONS}


def spell(program: ExportedProgram, functions: Mapping[Any, _Call] = SPELLED) -> None:
    """Replace functions of sizes in a private copy."""
    for _, node in list(graphs.every_node(program.graph_module)):
        if node.op != "call_function" or node.target not in functions:
            continue

        def call(target: Any, *args: Any, before: Node = node) -> Any:
            values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
            if not any(isinstance(arg, Node) for arg in args):
                return target(*values)
            return insert_call(before, target, args, meta={**before.meta, "val": target(*values)})

        spelled = functions[node.target](call, *node.args)
        if isinstance(spelled, Node):
            node.replace_all_uses_with(spelled)
            node.graph.erase_node(node)


def lacks_instruction(node: Node) -> bool:
    """Return whether a node computes a number by a function that a file has no instruction for."""
    value = node.meta.get("val")
    if node.target in _JOINING:
        return not isinstance(value, (bool, torch.SymBool))
    if node.target in _OF_WHOLE_NUMBERS:
        return isinstance(value, (float, torch.SymFloat))
    return isinstance(node.target, (FunctionType, BuiltinFunctionType)) and node.target not in _KNOWN
