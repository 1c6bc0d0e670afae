"""Operators of the Edge dialect that a step puts into a graph."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from executorch.exir.dialects._ops import ops  # the only name of the Edge dialect's operators

ADD_NUMBER = ops.edge.aten.add.Scalar
CLONE = ops.edge.aten.clone.default
CLONE_IN_ORDER = ops.edge.dim_order_ops._clone_dim_order.default
INDEX_PUT = ops.edge.aten.index_put.default
INDEX_PUT_IN_PLACE = ops.edge.aten.index_put_.default
LESS = ops.edge.aten.lt.Scalar
VIEWS = (ops.edge.aten.view_copy.default, ops.edge.aten.view.default)
WHERE = ops.edge.aten.where.self


@lru_cache(maxsize=1024)
def edge_operator(name: str) -> Any:
    """Return an Edge operator, such as "aten.mul.Tensor"; AttributeError or RuntimeError if there is none."""
    found = ops.edge
    for part in name.split("."):
        found = getattr(found, part)
    return found
