"""Tracing of small functions that compute what an operator does, with torch's decompositions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig
from executorch.exir.passes.memory_format_ops_pass import MemoryFormatOpsPass
from executorch.exir.passes.remove_graph_asserts_pass import RemoveNonCoreAtenOpGraphAssertsPass
from executorch.exir.passes.replace_aten_with_edge_pass import OpReplacePass
from executorch.exir.program._program import _default_decomposition_table, _get_aten_to_edge_passes
from torch._decomp import decomposition_table  # all decompositions that torch has, by operator; no public name
from torch._dispatch.python import enable_python_dispatcher  # runs operators on fake tensors
from torch._export.passes.replace_view_ops_with_view_copy_ops_pass import ReplaceViewOpsWithViewCopyOpsPass
from torch._ops import OpOverload
from torch.export._remove_effect_tokens_pass import _remove_effect_tokens
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from exir_lowering._upstream.fakes import FakeTensorMode
from exir_lowering._upstream.operators import wrapped_operator


def dialect_passes(config: EdgeCompileConfig) -> list[Any]:
    """Return ExecuTorch's passes from core ATen to Edge operators, in its order."""
    before, _ = _get_aten_to_edge_passes(config)
    passes = [RemoveNonCoreAtenOpGraphAssertsPass(), ReplaceViewOpsWithViewCopyOpsPass(), *before, OpReplacePass()]
    return passes if config._skip_dim_order else [*passes, MemoryFormatOpsPass()]


def own_decomposition(target: Any) -> Callable[..., Any] | None:
    """Return torch's decomposition of an operator, None if it has none."""
    operator = wrapped_operator(target)
    found: Callable[..., Any] | None = decomposition_table.get(operator)
    if found is None and isinstance(operator, OpOverload) and operator.has_kernel_for_dispatch_key(_COMPOSITE):
        return operator.decompose
    return found


remove_effect_tokens = _remove_effect_tokens  # plain calls in the place of those with effects, in a program itself
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@cache
def _prims() -> Mapping[Any, Callable[..., Any]]:
    """Return what computes torch's primitives by ATen operators: decompositions are written in them."""
    operators: Any = [getattr(getattr(torch.ops.prims, name), "default", None) for name in dir(torch.ops.prims)]
    return {operator: operator.impl_aten for operator in operators if getattr(operator, "impl_aten", None) is not None}


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
    table = {**_prims(), **_default_decomposition_table(), **decompositions}
    with mode, enable_python_dispatcher(), torch.no_grad():
        traced = make_fx(functionalize(function, remove="mutations"), decomposition_table=table)(*values)
    traced.graph.eliminate_dead_code()
    for step in dialect_passes(config):
        traced = step(traced).graph_module
    traced.graph.eliminate_dead_code()
    return traced
