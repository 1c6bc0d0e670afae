"""Which operators the machine gets."""

from __future__ import annotations

import torch

from exir_lowering import CompileSpec
from exir_lowering.partitioners import SupportPartitioner, constant_arguments, dtypes, ops, where
from tinyvec.backend import OPERATORS, TinyvecBackend


def _takes_tensors(node: torch.fx.Node) -> bool:
    operands = [operand for operand in node.args if operand is not None]  # a linear without bias
    return all(isinstance(o, torch.fx.Node) and isinstance(o.meta["val"], torch.Tensor) for o in operands)


def tinyvec_partitioner(precision: str = "float32") -> SupportPartitioner:
    """Return a partitioner that gives the machine every operator that it has.

    Args:
        precision: How weights are stored: "float32", or "float16" in half the bytes.
    """
    backend_id = TinyvecBackend.backend_id
    tensors_only = where(_takes_tensors, "an operand is a number, the machine takes tensors")
    return SupportPartitioner(
        {backend_id: ops(*OPERATORS) & dtypes(torch.float32) & tensors_only & constant_arguments("alpha")},
        compile_specs={backend_id: [CompileSpec("precision", precision.encode())]},
        keep_whole=[torch.ops.aten.linear.default],
    )
