"""Partitioners that take less than the given ones: nothing random, nothing for other backends, and only what pays.

The figures were fitted by hand to chains of 2 to 32 elementwise operators and to linear layers of 16 to 256, with
XNNPACK on one core (x86-64 with AVX-512). They are constants, as processes that train together have to partition alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.compiler import DelegationSpec, Partitioner, PartitionResult
from exir_lowering._upstream.operators import on_host, returns_view
from exir_lowering.dynamo.in_pytorch import is_host_call, is_random
from exir_lowering.graphs import measures
from exir_lowering.model import Rejection
from exir_lowering.plans.planned import MethodPlan
from exir_lowering.plugins.backend import ExplainedResult
from exir_lowering.steps.rewriting import gains

_COST = "cost"  # the code of what is refused since it would not pay

_OPERATOR, _VIEW = 2.5e-6, 1e-6
"""Seconds of each call of an operator in PyTorch, besides its work, and of one that returns a view."""

_CALL, _COPIED_BYTE = 6e-6, 5e-11
"""Seconds of each call of a partition, besides its work, and for each byte of its results, which are copied."""

_SURE = 1.2
"""How many times longer than in PyTorch a partition has to take before it is given up: the figures are rough."""

_IN_PYTORCH = ("higher-order", "it is a higher-order operator, which PyTorch calls")
_RANDOM = (
    "random",
    "it draws random numbers; PyTorch draws them in the model's order, so that a seed gives the same results",
)

Refusal = tuple[str, str]  # the code and the reason for which a node goes back to the host
Tagged = Mapping[str, Sequence[Node]]  # all tagged nodes, by tag


class LessPartitioner(Partitioner):  # type: ignore[misc]
    """Does what another partitioner does, then takes back the nodes that it refuses."""

    def __init__(self, partitioner: Partitioner) -> None:
        super().__init__()
        self.partitioner = partitioner

    @classmethod
    def of(cls, partitioner: Partitioner, *settings: Any) -> Partitioner:
        """Return such a partitioner, of a class that reports call by the name of the other one's."""
        made: Partitioner = type(type(partitioner).__name__, (cls,), {})(partitioner, *settings)
        return made

    def refuse(self, tagged: Tagged, destinations: Mapping[str, DelegationSpec]) -> Mapping[Node, Refusal]:
        """Return the nodes that go back to the host, each with the reason."""
        return {}

    def ops_to_not_decompose(self, program: ExportedProgram) -> Any:
        """Return what the other partitioner returns."""
        return self.partitioner.ops_to_not_decompose(program)

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Partition as the other one, and take back what is refused."""
        result = self.partitioner.partition(exported_program)
        destinations: Mapping[str, DelegationSpec] = result.partition_tags
        found = [
            (graphs.qualified_name(path, node), node, node.meta[graphs.DELEGATION_TAG])
            for path, node in graphs.every_node(result.tagged_exported_program.graph_module)
            if node.meta.get(graphs.DELEGATION_TAG) is not None
        ]
        tagged: dict[str, list[Node]] = {}
        for _, node, tag in found:
            tagged.setdefault(tag, []).append(node)
        refusals = self.refuse(tagged, destinations)
        rejections, used = list(getattr(result, "rejections", ())), set()
        by = type(self.partitioner).__name__
        for name, node, tag in found:
            if node not in refusals:
                used.add(tag)
                continue
            code, reason = refusals[node]
            del node.meta[graphs.DELEGATION_TAG]
            rejections.append(Rejection("", name, graphs.operator_name(node), reason, by, code))
        kept = {tag: spec for tag, spec in destinations.items() if tag in used}
        adjustments = tuple(getattr(result, "adjustments", ()))
        return ExplainedResult(result.tagged_exported_program, kept, tuple(rejections), adjustments)


class ForBackend(LessPartitioner):
    """Takes what the other one takes for one backend."""

    def __init__(self, partitioner: Partitioner, backend_id: str) -> None:
        super().__init__(partitioner)
        self._backend_id = backend_id

    def refuse(self, tagged: Tagged, destinations: Mapping[str, DelegationSpec]) -> Mapping[Node, Refusal]:
        """Refuse what would go to another backend."""
        other = {tag: destinations[tag].backend_id for tag in tagged if tag in destinations}
        return {
            node: ("backend", f"the backend {other[tag]!r} would take it, but this attempt is for {self._backend_id!r}")
            for tag, nodes in tagged.items()
            for node in nodes
            if other.get(tag, self._backend_id) != self._backend_id
        }


class LeavingRandom(LessPartitioner):
    """Takes no operator that draws random numbers, and no call of a higher-order operator that PyTorch makes."""

    def refuse(self, tagged: Tagged, destinations: Mapping[str, DelegationSpec]) -> Mapping[Node, Refusal]:
        """Refuse what PyTorch runs."""
        nodes = [node for members in tagged.values() for node in members]
        random = dict.fromkeys(filter(is_random, nodes), _RANDOM)
        return random | dict.fromkeys(filter(is_host_call, nodes), _IN_PYTORCH)


class ApartByRandom(LeavingRandom):
    """Divides partitions by the random numbers that they need, so that these can be drawn in the order of the model."""

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Partition as the other one, and divide each partition."""
        result = super().partition(exported_program)
        divided: dict[str, DelegationSpec] = {}
        for _, inner in graphs.walk(result.tagged_exported_program.graph_module):
            for node, drawn in _count_drawn(inner).items():
                tag = node.meta.get(graphs.DELEGATION_TAG)
                if tag in result.partition_tags:
                    node.meta[graphs.DELEGATION_TAG] = f"{tag}_{drawn}"
                    divided[f"{tag}_{drawn}"] = result.partition_tags[tag]
        return ExplainedResult(result.tagged_exported_program, divided, result.rejections, result.adjustments)


def _count_drawn(module: GraphModule) -> dict[Node, int]:
    """Return for each node up to which random number has to be drawn before it; no edge leads to fewer."""
    counts: dict[Node, int] = {}
    drawn = 0
    for node in module.graph.nodes:
        counts[node] = max((counts[source] for source in node.all_input_nodes), default=0)
        if is_random(node):
            drawn += 1
            counts[node] = drawn
    return counts


class LeavingLosses(LessPartitioner):
    """Makes no partition that would take longer than in PyTorch, where ExecuTorch's runtime executes it."""

    def __init__(self, partitioner: Partitioner, is_hosted: Callable[[str], bool]) -> None:
        super().__init__(partitioner)
        self._is_hosted = is_hosted

    @property
    def asked_of_forms(self) -> Partitioner:
        """Who says whether a form would be taken: of a few operators alone, nothing would be worth it."""
        return self.partitioner

    def refuse(self, tagged: Tagged, destinations: Mapping[str, DelegationSpec]) -> Mapping[Node, Refusal]:
        """Refuse the partitions that would not pay, as far as sizes tell."""
        refusals: dict[Node, Refusal] = {}
        for tag, nodes in tagged.items():
            backend_id = destinations[tag].backend_id if tag in destinations else ""
            if backend_id and self._is_hosted(backend_id):
                times = _compare(nodes)
                if times > _SURE:
                    reason = f"its partition in {backend_id!r} would take {times:.1f} times as long as in PyTorch"
                    refusals |= dict.fromkeys(nodes, (_COST, f"{reason}, by its size"))
        return refusals


def _compare(nodes: Sequence[Node]) -> float:
    """Return how many times as long as in PyTorch operators take as a partition."""
    operators, members = [node for node in nodes if graphs.is_operator(node)], set(nodes)
    work = sum(map(gains.in_delegate, operators)) * 1e-9
    results = [node for node in nodes if not members.issuperset(node.users)]
    copied = sum(map(measures.value_bytes, results)) * _COPIED_BYTE
    calls = sum(_VIEW if returns_view(on_host(node.target)) else _OPERATOR for node in operators)
    return (work + _CALL + copied) / (work + calls) if operators else math.inf


def takes_any(methods: Iterable[MethodPlan]) -> bool:
    """Return whether partitioners take anything of methods, also if it is not worth it."""
    return any(
        method.partitions or any(reason.code == _COST for node in method.host for reason in node.reasons)
        for method in methods
    )
