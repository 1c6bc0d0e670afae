"""What a stand-in for torch.fx's `CapabilityBasedPartitioner` needs to know of it."""

from __future__ import annotations

from torch.fx import Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner

from exir_lowering._upstream.hooks import proposing_with, qualified_operator, refused

__all__ = ["proposing_with", "qualified_operator", "supported"]


def supported(partitioner: CapabilityBasedPartitioner) -> dict[Node, None]:
    """Ask a partitioner's support for each node, and tell who listens of those that it refuses."""
    modules = dict(partitioner.graph_module.named_modules())
    found: dict[Node, None] = {}
    for node in partitioner.graph_module.graph.nodes:
        if node.op == "output":
            continue
        if partitioner.operator_support.is_node_supported(modules, node):
            found[node] = None
        else:
            refused(partitioner.operator_support, node)
    return found
