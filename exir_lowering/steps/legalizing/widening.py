"""Compute in a wider type, between casts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from exir_lowering._upstream.programs import pytree
from exir_lowering.graphs.measures import tensors


def in_dtype(run: Any, narrow: Sequence[torch.dtype], wide: torch.dtype, node: Node) -> Callable[..., Any]:
    """Return a function that computes with tensors of some types cast to another one, with results as a node's."""
    dtypes = [value.dtype for value in tensors(node.meta["val"])]

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in narrow:
            return value.to(wide)
        return wide if isinstance(value, torch.dtype) and value in narrow else value

    def compute(*args: Any, **kwargs: Any) -> Any:
        found = run(*pytree.tree_map(cast, args), **pytree.tree_map(cast, kwargs))
        if isinstance(found, torch.Tensor):
            return found.to(dtypes[0])
        return tuple(value.to(dtype) for value, dtype in zip(found, dtypes, strict=True))

    return compute
