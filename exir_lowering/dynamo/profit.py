"""Partitions that take longer in ExecuTorch's runtime than in PyTorch, as predicted, stay in PyTorch.

A call of a partition costs as much as some operators in PyTorch, and its results are copied. So a few small operators
are not worth it. What a partition computes counts as equally fast in both, as nobody has measured it: what decides is
what comes on top. These figures were fitted by hand to chains of 2 to 32 elementwise operators and to linear layers of
16 to 256, with XNNPACK on one core (x86-64 with AVX-512).

They are constants, and not measured in each process: what carries over to other machines are ratios, and the model that
predicts the work is of the same machine; and processes that train together have to make the same partitions, whatever
else their machines do when they start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.schemas import returns_view
from exir_lowering.dynamo.aliases import on_host
from exir_lowering.dynamo.wrapped import LessPartitioner, named_after
from exir_lowering.graphs import measures
from exir_lowering.plans.values import MethodPlan
from exir_lowering.plugins.costs import CostModel
from exir_lowering.plugins.predicting import cost_of

_CODE = "cost"
"""The code of what is refused."""

_OPERATOR = 2.5e-6
"""Seconds of each call of an operator in PyTorch, besides its work."""

_VIEW = 1e-6
"""The same of one that returns a view."""

_CALL = 6e-6
"""Seconds of each call of a partition, besides its work."""

_COPIED_BYTE = 5e-11
"""Seconds for each byte of a partition's results, which are copied."""

_SURE = 1.2
"""How many times longer than in PyTorch a partition has to take before it is given up: predictions are rough."""


def leaving_losses(
    partitioner: Partitioner, is_hosted: Callable[[str], bool], costs: CostModel | None = None
) -> Partitioner:
    """Return a partitioner that does what another one does, without partitions that would take longer than in PyTorch.

    Args:
        partitioner: The other one.
        is_hosted: Whether ExecuTorch's runtime executes the payloads of a backend; the partitions of others stay.
        costs: What operators cost in delegates, in seconds; None is the default model.
    """
    made: Partitioner = named_after(_LeavingLosses, partitioner)(partitioner)
    made.is_hosted, made.costs = is_hosted, costs
    return made


def takes_any(methods: Iterable[MethodPlan]) -> bool:
    """Return whether partitioners take anything of methods, also if it is not worth it."""
    return any(
        method.partitions or any(reason.code == _CODE for node in method.host for reason in node.reasons)
        for method in methods
    )


class _LeavingLosses(LessPartitioner):
    is_hosted: Callable[[str], bool]
    costs: CostModel | None

    @property
    def asked_of_forms(self) -> Partitioner:
        """Who says whether a form would be taken: of a few operators alone, nothing would be worth it."""
        return self.partitioner

    def look_at(self, result: PartitionResult) -> None:
        nodes: dict[str, list[Node]] = {}
        for _, inner in graphs.walk(result.tagged_exported_program.graph_module):
            for node in inner.graph.nodes:
                if node.meta.get(graphs.DELEGATION_TAG) in result.partition_tags:
                    nodes.setdefault(node.meta[graphs.DELEGATION_TAG], []).append(node)
        self._losses = self._find_losses(nodes, result.partition_tags)

    def _find_losses(
        self, nodes: Mapping[str, Sequence[Node]], destinations: Mapping[str, DelegationSpec]
    ) -> dict[str, str]:
        losses = {}
        for tag, taken in nodes.items():
            backend_id = destinations[tag].backend_id
            if self.is_hosted(backend_id):
                inside, in_pytorch = self._seconds(taken, backend_id)
                if inside > _SURE * in_pytorch:
                    times = f"{inside * 1e6:.1f} us in {backend_id!r} and {in_pytorch * 1e6:.1f} us in PyTorch"
                    losses[tag] = f"its partition would take {times}, as predicted"
        return losses

    def _seconds(self, nodes: Sequence[Node], backend_id: str) -> tuple[float, float]:
        """Return how long operators take as a partition, and in PyTorch."""
        work = cost_of(nodes, backend_id, self.costs)
        members = set(nodes)
        results = [node for node in nodes if not members.issuperset(node.users)]
        copied = sum(map(measures.value_bytes, results)) * _COPIED_BYTE
        called = (on_host(node.target) for node in nodes if graphs.is_operator(node))
        return work + _CALL + copied, work + sum(_VIEW if returns_view(each) else _OPERATOR for each in called)

    def refuse(self, node: Node, destination: DelegationSpec | None) -> tuple[str, str] | None:
        reason = self._losses.get(node.meta[graphs.DELEGATION_TAG])
        return None if reason is None else (_CODE, reason)
