"""What AOTAutograd decomposes: core ATen, except where that changes random numbers or gradients.

It always decomposes max pooling into one with indices; for partitioners that want it whole, that is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from exir_lowering import graphs
from exir_lowering._upstream.dynamo import core_aten_decompositions, get_decompositions
from exir_lowering.errors.interrupts import let_through
from exir_lowering.plugins.backend import Partitioner

_KEPT = (
    "aten.bernoulli",  # decomposed, it draws other numbers than in eager PyTorch
    "aten.rrelu",
)
_KEPT_IN_TRAINING = ("aten._scaled_dot_product_flash_attention_for_cpu",)
"""Decomposed, it returns something else than what its own backward operator needs."""


def choose_decompositions(given: Mapping[Any, Callable[..., Any]] | None, *, training: bool) -> dict[Any, Any]:
    """Return the decompositions for a graph, which may be differentiated; None stands for the default ones."""
    if given is not None:
        return dict(given)
    core: Mapping[Any, Any] = core_aten_decompositions()
    kept = _KEPT + (_KEPT_IN_TRAINING if training else ())
    chosen = {operator: made for operator, made in core.items() if not str(operator).startswith(kept)}
    return {**chosen, _NORM: _decompose_mixed_norm}


_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_norm = get_decompositions([_NORM])[_NORM]


def _decompose_mixed_norm(x: torch.Tensor, weight: torch.Tensor | None, *args: Any) -> Any:
    """Decompose a batch normalisation whose weights have another dtype, as with autocast."""
    # What it saves for its gradient has another dtype in a graph than when it is run.
    return NotImplemented if weight is None or weight.dtype is x.dtype else _norm(x, weight, *args)


def differentiable_attention(given: Mapping[Any, Any] | None, *, training: bool) -> AbstractContextManager[None]:
    """Return a context that traces attention as products and softmax, so that its backward graph is core ATen."""
    # A caller's own decompositions decide themselves.
    return sdpa_kernel(SDPBackend.MATH) if training and given is None else nullcontext()


_POOL, _WITH_INDICES = torch.ops.aten.max_pool2d.default, torch.ops.aten.max_pool2d_with_indices.default


def restore_pools(program: ExportedProgram, partitioners: Sequence[Partitioner]) -> None:
    """Replace max poolings whose indices nobody reads by plain ones, if a partitioner wants these whole."""
    pools = [node for node in program.graph.nodes if node.target is _WITH_INDICES and _reads_values_only(node)]
    if not pools or not any(_wants(partitioner, _POOL, program) for partitioner in partitioners):
        return
    for pool in pools:
        for value in [*pool.users]:
            # It keeps its name, by which it may be returned.
            value.target, value.args, value.kwargs = _POOL, pool.args, pool.kwargs
            value.meta = {**pool.meta, **value.meta}
        program.graph.erase_node(pool)


def _reads_values_only(pool: Node) -> bool:
    return bool(pool.users) and all(graphs.is_getitem(user) and user.args[1] == 0 for user in pool.users)


def _wants(partitioner: Partitioner, operator: Any, program: ExportedProgram) -> bool:
    try:
        wanted, _ = partitioner.ops_to_not_decompose(program)
    except Exception as error:  # it stays as it is: nothing is decomposed here, so it need not know an answer
        let_through(error)
        return False
    return operator in (wanted or ())
