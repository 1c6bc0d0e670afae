"""Equal calls of an operator are computed once, such as the mask that each layer converts anew."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import Node

from exir_lowering.graphs.operators.purity import only_computes
from exir_lowering.plugins import Doubt, Rewrite, Scope

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class CommonSubexpressions(Rewrite):
    """Replaces a call by an earlier one of the same operator with the same arguments.

    Operators that are random, or not known to have no effect, are left alone. As operands are rewritten first, equal
    chains become one from their beginning to their end. Source: local value numbering, Cocke and Schwartz, 1970.
    """

    name = "common-subexpressions"
    operators = ("*",)
    exactness = "bits"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return an earlier node that is equal to a node."""
        if not only_computes(node):
            return None
        try:
            key = (node.target, _key(node.args), _key(node.kwargs))
        except TypeError:
            return None
        first: Node | None = scope.memory.get(key)
        if first is not None and scope.exists(first):
            return first
        scope.memory[key] = node
        return None


def _key(argument: Any) -> Hashable:
    """Return what equal arguments have in common.

    Raises:
        TypeError: An argument is not one that can be compared, such as a symbolic number.
    """
    if isinstance(argument, Node):
        return argument
    if isinstance(argument, (list, tuple)):
        return tuple(map(_key, argument))
    if isinstance(argument, dict):
        return tuple((name, _key(argument[name])) for name in sorted(argument))
    if isinstance(argument, _PLAIN):
        return type(argument), repr(argument)  # since 0.0 == -0.0, 1 == True, and nan is not nan
    raise TypeError(f"arguments of type {type(argument).__name__} are not compared")
