"""Quantisation by torchao that no backend took, in plain operators: there are no out variants of its own, nor kernels.

It stays until a file is made, since the file's configuration says whether ExecuTorch fuses embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.guards import without_guards
from exir_lowering._upstream.legalizing import own_decomposition, trace
from exir_lowering._upstream.programs import fake_mode_of
from exir_lowering.steps.legalizing.fragments import UNCHECKED, attributes_of, calling, inline

_DEQUANTIZE, _EMBEDDING = "torchao.dequantize_affine.default", "aten.embedding.default"
COMPUTED = (_DEQUANTIZE, "torchao.quantize_affine.default", "torchao.choose_qparams_affine.default")
"""Operators whose own code, in plain operators, takes their place."""


def compute_plainly(program: ExportedProgram, *, fusing: bool) -> None:
    """Replace torchao's operators in a private copy in Edge dialect, if `fusing` not those of embeddings."""
    for _, module in graphs.walk(program.graph_module):
        found = [node for node in module.graph.nodes if graphs.operator_name(node) in COMPUTED]
        for node in reversed(found):  # so that what reads a table is replaced before it
            computed = own_decomposition(node.target)
            if graphs.operator_name(node) == _DEQUANTIZE:
                rows = cast(Any, node.args[1])[0] == 1  # whose scales can be taken too
                lookups = [user for user in node.users if rows and graphs.operator_name(user) == _EMBEDDING]
                if fusing and len(lookups) == len(node.users):
                    continue
                for user in lookups:
                    user.args, user.kwargs = (user.args[1], *node.args), node.kwargs
                    _replace(module, user, _look_up)
            if node.users and computed is not None:
                _replace(module, node, computed)
            elif not node.users:
                module.graph.erase_node(node)


def _look_up(indices: Any, table: Any, block: Any, scale: Any, zero_point: Any, *rest: Any, **kwargs: Any) -> Any:
    """Return rows of a table whose integers stand for numbers: an embedding, of which only these are computed."""

    def of_rows(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(indices, values.reshape(table.shape[0], -1))

    points = of_rows(zero_point) if zero_point is not None and zero_point.numel() else None
    blocks, taken = [*[1] * indices.dim(), block[1]], torch.nn.functional.embedding(indices, table)
    return torch.ops.torchao.dequantize_affine(taken, blocks, of_rows(scale), points, *rest, **kwargs)


def _divide(value: torch.Tensor, divisor: Any) -> Any:
    """Divide by a tensor: for a number, ExecuTorch's kernel multiplies by its reciprocal, which may round otherwise."""
    return NotImplemented if isinstance(divisor, torch.Tensor) else value / torch.full_like(value, divisor)


def _replace(module: GraphModule, node: Node, function: Callable[..., Any]) -> None:
    """Replace a node by what a function computes of its operands."""
    mode: Any = fake_mode_of(module)
    values = [operand.meta["val"] for operand in node.all_input_nodes]
    with without_guards(mode.shape_env):
        fragment = trace(calling(node, function), values, mode, UNCHECKED, {torch.ops.aten.div.Tensor: _divide})
    inline(node, fragment, attributes_of(module, node))
    for user in list(node.users):
        module.graph.erase_node(user)
    module.graph.erase_node(node)
