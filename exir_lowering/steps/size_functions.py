"""Functions of sizes that a file has no instruction for, in terms of those that it has.

`torch.sym_sum` is several additions, a whole power several multiplications, and the largest whole number below x is
-ceil(-x). ExecuTorch's passes do not trace the first one, so this comes before a conversion; decompositions make them
too, so it comes again before a file is made.
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

_Call = Callable[..., Any]

_MOST = 16  # how large an exponent may be


def _raise(call: _Call, base: Any, exponent: Any) -> Any:
    if type(exponent) is not int or not 0 < exponent <= _MOST:
        return None
    return reduce(lambda product, factor: call(operator.mul, product, factor), [base] * exponent)


_SPELLED: Mapping[Any, _Call] = {
    torch.sym_sum: lambda call, terms: reduce(lambda total, term: call(operator.add, total, term), terms),
    operator.pow: _raise,
    math.floor: lambda call, x: call(operator.neg, call(math.ceil, call(operator.neg, x))),
}

# `emit` joins truths itself.
_KNOWN = frozenset((operator.getitem, operator.and_, operator.or_, operator.ne, operator.xor, *SIZE_FUNCTIONS))


def needs_spelling(program: ExportedProgram) -> bool:
    """Return whether a program has functions of sizes that are to be replaced."""
    return any(node.target in _SPELLED for _, node in graphs.every_node(program.graph_module))


def spell(program: ExportedProgram) -> None:
    """Replace functions of sizes in a private copy."""
    for _, node in list(graphs.every_node(program.graph_module)):
        if node.op != "call_function" or node.target not in _SPELLED:
            continue

        def call(target: Any, *args: Any, before: Node = node) -> Any:
            values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
            if not any(isinstance(arg, Node) for arg in args):
                return target(*values)
            with before.graph.inserting_before(before):
                made = before.graph.call_function(target, args)
            made.meta = {**before.meta, "val": target(*values)}
            return made

        spelled = _SPELLED[node.target](call, *node.args)
        if isinstance(spelled, Node):
            node.replace_all_uses_with(spelled)
            node.graph.erase_node(node)


def lacks_instruction(node: Node) -> bool:
    """Return whether a node computes a number by a function that a file has no instruction for."""
    return isinstance(node.target, (FunctionType, BuiltinFunctionType)) and node.target not in _KNOWN
