"""Whether a node only computes, so that it can be computed once for all equal nodes, or not at all."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from exir_lowering._upstream.operators import wrapped_operator
from exir_lowering.graphs.operators import pure
from exir_lowering.graphs.operators.names import target_name
from exir_lowering.graphs.walking import is_getitem

_EDGE_ONLY = frozenset({"dim_order_ops._to_dim_order_copy.default", "dim_order_ops._clone_dim_order.default"})
"""Operators of the Edge dialect that are views or copies of their argument."""

_ASSERTIONS = ("_assert", "sym_constrain")
"""Parts of the names of operators that are called to fail, not for their result."""


def only_computes(node: Node) -> bool:
    """Return whether a node's operator is known to have no effect but its result, which depends on its arguments."""
    if node.op != "call_function":
        return False
    return is_getitem(node) or _only_computes(node.target)


@lru_cache(maxsize=4096)
def _only_computes(target: Any) -> bool:
    name = target_name(target)
    if name in _EDGE_ONLY:
        return True
    if torch.Tag.nondeterministic_seeded in getattr(wrapped_operator(target), "tags", ()):
        return False
    return pure.find(name) is not None and not any(part in name for part in _ASSERTIONS) and "empty" not in name
