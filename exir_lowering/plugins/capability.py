"""What a replacement for torch.fx's `CapabilityBasedPartitioner` needs to know about it."""

from __future__ import annotations

from torch.fx import Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner

from exir_lowering._upstream.hooks import note_refusal, proposing_with, qualified_operator

__all__ = ["list_supported", "proposing_with", "qualified_operator"]


def list_supported(partitioner: CapabilityBasedPartitioner) -> dict[Node, None]:
    """Return the nodes that a partitioner's support takes, and report those that it refuses."""
    modules = dict(partitioner.graph_module.named_modules())
    found: dict[Node, None] = {}
    for node in partitioner.graph_module.graph.nodes:
        if node.op == "output":
            continue
        if partitioner.operator_support.is_node_supported(modules, node):
            found[node] = None
        else:
            note_refusal(partitioner.operator_support, node)
    return found
