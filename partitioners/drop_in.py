"""The proposal algorithm in the place of that of torch.fx's `CapabilityBasedPartitioner`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.fx import Node
from torch.fx.passes.infra.partitioner import Partition

from exir_lowering import InputError
from exir_lowering.partitioners.algorithms.convex import contract, list_computing
from exir_lowering.plugins import asking

_NON_COMPUTE = ("torch.ops.aten.view", "_operator.getitem")
"""What torch.fx's partitioner never counts as computing when it drops partitions with a single node."""


def convex_proposals() -> AbstractContextManager[None]:
    """Return a context in which torch.fx's and ExecuTorch's partitioners propose with this algorithm, in all threads.

    This replaces methods of `CapabilityBasedPartitioner` and of ExecuTorch's `GroupBasedPartitioner`, so every
    partitioner that is based on them gains, including XNNPACK's. It takes linear time, and makes no more partitions
    than theirs where those may have parts that share no edge.
    """
    return _PROPOSING


def _propose(partitioner: Any) -> list[Partition]:
    """Propose partitions for a `CapabilityBasedPartitioner` or a subclass of it, from its attributes."""
    module = partitioner.graph_module
    supported = asking.list_supported(partitioner)
    nodes = list_computing(module)
    labels = {node: "" for node in nodes if node in supported}
    groups = [[node for node in group if node in labels] for group in getattr(partitioner, "node_groups", None) or ()]
    keep_apart = getattr(partitioner, "skip_horizontal_fusion", False)
    try:
        proposals = contract(nodes, labels, groups=groups, keep_apart=keep_apart)
    except InputError:  # a group that is not convex, which torch.fx does not look for: keep its convex parts together
        cut = {node: i for i, proposal in enumerate(contract(nodes, labels)) for node in proposal.nodes}
        parts: dict[tuple[int, int], list[Node]] = {}
        for i, group in enumerate(groups):
            for node in group:
                parts.setdefault((i, cut[node]), []).append(node)
        proposals = contract(nodes, labels, groups=parts.values(), keep_apart=keep_apart)
    # Each supported input and get_attr node goes with its first user that is in a proposal.
    number = {node: i for i, proposal in enumerate(proposals) for node in proposal.nodes}
    found: list[list[Node]] = [[] for _ in proposals]
    for node in supported:
        if node.op in ("placeholder", "get_attr"):
            home = next((number[user] for user in node.users if user in number), None)
            if home is not None:
                found[home].append(node)
    # More than one computing node, or one that may be alone.
    non_compute = {*_NON_COMPUTE, *partitioner.non_compute_ops}
    alone = set(partitioner.allowed_single_node_partition_ops)
    kept = []
    for constants, proposal in zip(found, proposals, strict=True):
        names = [asking.qualified_operator(node) for node in proposal.nodes if node.op == "call_function"]
        computing = sum((name not in non_compute) + (name in alone) for name in names)
        if partitioner.allows_single_node_partition or computing > 1:
            kept.append([*constants, *proposal.nodes])
    order = {node: i for i, node in enumerate(reversed(module.graph.nodes))}
    return [
        Partition(number, members, [order[node] for node in members]) for number, members in enumerate(reversed(kept))
    ]


_PROPOSING = asking.proposing_with(_propose)
