"""Tracing of small functions that compute what an operator does, with torch's decompositions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig
from torch._decomp import decomposition_table  # all decompositions that torch has, by operator; no public name
from torch._dispatch.python import enable_python_dispatcher  # runs operators on fake tensors
from torch._ops import OpOverload
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from exir_lowering._upstream.conversion import default_table, dialect_passes
from exir_lowering._upstream.fakes import FakeTensorMode
from exir_lowering._upstream.operators import wrapped_operator


def own_decomposition(target: Any) -> Callable[..., Any] | None:
    """Return torch's decomposition of an operator, None if it has none."""
    operator = wrapped_operator(target)
    found: Callable[..., Any] | None = decomposition_table.get(operator)
    if found is None and isinstance(operator, OpOverload) and operator.has_kernel_for_dispatch_key(_COMPOSITE):
        return operator.decompose
    return found


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@cache
def _prims() -> Mapping[Any, Callable[..., Any]]:
    """Return what computes torch's primitives by ATen operators: decompositions are written in them."""
    found: dict[Any, Callable[..., Any]] = {}
    for name in dir(torch.ops.prims):
        packet = getattr(torch.ops.prims, name)
        operator = getattr(packet, "default", None)
        if (computed := getattr(operator, "impl_aten", None)) is not None:
            found[operator] = computed
    return found


def trace(
    function: Callable[..., Any],
    values: Sequence[Any],
    mode: FakeTensorMode,
    config: EdgeCompileConfig,
    decompositions: Mapping[Any, Callable[..., Any]] = {},
) -> GraphModule:
    """Trace a function of fake tensors and sizes into a graph of Edge dialect; what the function raises is raised.

    It returns tensors, in a tuple.
    """
    table = {**_prims(), **default_table(), **decompositions}
    with mode, enable_python_dispatcher(), torch.no_grad():
        traced = make_fx(functionalize(function, remove="mutations"), decomposition_table=table)(*values)
    traced.graph.eliminate_dead_code()
    for step in dialect_passes(config):
        traced = step(traced).graph_module
    traced.graph.eliminate_dead_code()
    return traced
