"""Fragmentation and capacity: which proposals are too small to be worth a call, and which are too large for one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from exir_lowering import Adjustment, InputError, Rejection
from exir_lowering.partitioners.convex import Proposal
from exir_lowering.partitioners.support import Scope


@dataclass(frozen=True, slots=True)
class Limits:
    """How small and how large a partition may be.

    Attributes:
        min_nodes: Fewer operators than this and the partition is dropped, unless it is the whole graph.
        min_flops: Fewer floating-point operations than this and it is dropped, unless it is the whole graph.
        max_partitions: How many partitions a graph keeps, those with the most floating-point operations.
        max_nodes: More operators than this and it is cut where the fewest bytes cross.
        max_weight_bytes: More bytes of parameters, buffers and constants than this and it is cut so too.
    """

    min_nodes: int = 1
    min_flops: int = 0
    max_partitions: int | None = None
    max_nodes: int | None = None
    max_weight_bytes: int | None = None


def apply(
    proposals: Sequence[Proposal],
    limits: Limits,
    scope: Scope,
    *,
    groups: Iterable[Iterable[Node]] = (),
    by: str,
) -> tuple[list[Proposal], list[Rejection], list[Adjustment]]:
    """Cut what is too large, drop what is too small, then what is too many.

    Args:
        proposals: The proposals of one graph, in topological order.
        limits: The limits.
        scope: The graph.
        groups: Nodes that must stay together.
        by: Who asks, for the reasons.

    Returns:
        The proposals that are left, in topological order, a rejection for each operator that lost its place, and an
        adjustment for each proposal that was cut or dropped.
    """
    raise NotImplementedError
