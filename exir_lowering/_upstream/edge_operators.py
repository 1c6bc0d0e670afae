"""Operators of the Edge dialect that a step puts into a graph."""

from __future__ import annotations

from executorch.exir.dialects._ops import ops  # the only name of the Edge dialect's operators

CLONE = ops.edge.aten.clone.default
VIEWS = (ops.edge.aten.view_copy.default, ops.edge.aten.view.default)
