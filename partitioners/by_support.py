"""A partitioner for backends that can say, node by node, what they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import CompileSpec, ExplainedResult
from exir_lowering.partitioners.algorithms.claims import ClaimingPartitioner
from exir_lowering.partitioners.algorithms.convex import Proposal, propose_partitions
from exir_lowering.partitioners.algorithms.limits import Limits
from exir_lowering.partitioners.supports.support import GraphScope, SupportLike


class SupportPartitioner(ClaimingPartitioner):
    """Gives each backend the fewest convex partitions of what it supports, and says why the rest stays on the host.

    Args:
        supports: For each backend id, what it supports: a `Support`, a torch.fx `OperatorSupportBase`, or a function
            from a node to a bool. The first backend that takes a node gets it.
        compile_specs: The compile specs of each backend id.
        limits: How small and how large a partition may be.
        keep_apart: Whether parts of a partition that share no edge become separate partitions.
        own_state: Whether a buffer that one partition alone reads and writes moves into it; for backends that keep
            state from one call to the next.
        keep_whole: ATen operators, such as `torch.ops.aten.linear.default`, that are not decomposed on the way to Edge
            dialect where a backend supports them.

    Raises:
        InputError: An argument is invalid.
    """

    def __init__(
        self,
        supports: Mapping[str, SupportLike],
        *,
        compile_specs: Mapping[str, Sequence[CompileSpec]] | None = None,
        limits: Limits | None = None,
        keep_apart: bool = False,
        own_state: bool = False,
        keep_whole: Sequence[Any] = (),
    ) -> None:
        super().__init__(supports, compile_specs, limits, keep_apart, own_state, keep_whole)

    def partition(self, exported_program: ExportedProgram) -> ExplainedResult:
        """Tag what the backends support.

        Args:
            exported_program: A program in Edge dialect; its nodes get tags.

        Returns:
            The tagged program with a rejection for each operator that is left.

        Raises:
            PartitionerContractError: A support raised.
            InputError: A group of nodes that must stay together cannot be convex.
        """
        return self._claim(exported_program)

    def _propose(self, scope: GraphScope, groups: Sequence[Sequence[Node]]) -> Sequence[Proposal]:
        """Return the fewest convex partitions of a graph."""
        return propose_partitions(scope, self.supports, keep_apart=self.keep_apart)
