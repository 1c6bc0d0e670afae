"""Equal calls of an operator are computed once, such as the mask that every layer converts."""

from __future__ import annotations

import torch
from torch.fx import Node

from exir_lowering.graphs.operators.purity import only_computes
from exir_lowering.plugins import Doubt, Rewrite, Scope
from exir_lowering.rewrites.node_facts import call_key, is_quantisation


class CommonSubexpressions(Rewrite):
    """Replaces a call by an earlier one of the same operator with the same arguments.

    Operators that are random, or not known to have no effect, are left alone; so are those of quantisation, which torch
    duplicates because a backend fuses each pattern with separate dequantised operands. As operands are rewritten first,
    equal chains become one from their beginning to their end. Source: local value numbering, Cocke and Schwartz, 1970.
    """

    name = "common-subexpressions"
    operators = ("*",)
    exactness = "bits"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return an earlier node that is equal to a node."""
        if not only_computes(node) or is_quantisation(node):
            return None
        key = call_key(node)
        if key is None:
            return None
        first: Node | None = scope.memory.get(key)
        if first is not None and scope.exists(first) and first < node:  # forms that backends take are added later
            return first if _sizes(first) == _sizes(node) else None
        scope.memory[key] = node
        return None


def _sizes(node: Node) -> str:
    """Return what sizes a result has, or is: two calls have symbols of their own for those that depend on data."""
    given = node.meta.get("val")
    values = given if isinstance(given, (list, tuple)) else [given]
    return str([list(value.shape) if isinstance(value, torch.Tensor) else value for value in values])
