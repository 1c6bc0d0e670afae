"""Operators that draw random numbers: PyTorch runs them, in the order of the graph, so that a seed gives the same."""

from __future__ import annotations

import torch
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.operators import wrapped_operator
from exir_lowering.dynamo.wrapped import LessPartitioner, named_after

REASON = "it draws random numbers, which PyTorch does in the order of the model, so that a seed gives the same"


def is_random(node: Node) -> bool:
    """Return whether a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(wrapped_operator(node.target), "tags", ())


def list_random(module: GraphModule) -> list[str]:
    """Return the operators that draw random numbers, in the order in which they run."""
    return [
        graphs.operator_name(node)
        for _, inner in graphs.walk(module)
        for node in inner.graph.nodes
        if node.op == "call_function" and is_random(node)
    ]


def leaving_random(partitioner: Partitioner) -> Partitioner:
    """Return a partitioner that does what another one does, but takes no operator that draws random numbers."""
    made: Partitioner = named_after(_LeavingRandom, partitioner)(partitioner)
    return made


class _LeavingRandom(LessPartitioner):
    def refuse(self, node: Node, destination: DelegationSpec | None) -> tuple[str, str] | None:
        return ("random", REASON) if is_random(node) else None
