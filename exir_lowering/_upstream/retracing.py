"""What torch does to each node when it retraces a graph: what the new node takes over, and where it comes from."""

from __future__ import annotations

import torch

# Runs operators on fake tensors, as passes do.
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher

# What a composite operator consists of.
from torch._export.utils import _get_decomp_for_cia

# The metadata that a retraced node takes over from the node that it is made from.
from torch.fx.proxy import _COPY_META_FIELDS

# Where a node comes from.
from torch.fx.traceback import NodeSource, NodeSourceAction

COPIED_META = ("stack_trace", *_COPY_META_FIELDS)

decomposed_call = _get_decomp_for_cia


def source_of(node: torch.fx.Node, step: str) -> NodeSource:
    """Return the origin of a node made from another one; it shares the older history, which torch copies for each."""
    source = NodeSource(None, step, NodeSourceAction.CREATE)
    source.node_info = NodeSource.NodeInfo(node.name, str(node.target), id(node.graph))
    source.from_node = node.meta.get("from_node", [])
    return source
