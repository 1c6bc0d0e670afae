"""Partitioners that do less than another one: the basis of those that take something back from its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.model import Rejection
from exir_lowering.plugins.backend import ExplainedResult


class LessPartitioner(Partitioner):  # type: ignore[misc]
    """Does what another partitioner does, then takes back the nodes for which `refuse` gives a reason.

    Reports name the other one's class.
    """

    def __init__(self, partitioner: Partitioner) -> None:
        super().__init__()
        self.partitioner = partitioner

    def look_at(self, result: PartitionResult) -> None:
        """Look at the whole result, before anything is refused."""

    def refuse(self, node: Node, destination: DelegationSpec | None) -> tuple[str, str] | None:
        """Return the code and the reason for which a node goes back to the host; None to leave it."""
        return None

    def ops_to_not_decompose(self, program: ExportedProgram) -> Any:
        """Return what the other partitioner returns."""
        return self.partitioner.ops_to_not_decompose(program)

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Partition as the other one, and take back what is refused."""
        result = self.partitioner.partition(exported_program)
        self.look_at(result)
        destinations: Mapping[str, DelegationSpec] = result.partition_tags
        rejections, used = list(getattr(result, "rejections", ())), set()
        for path, inner in graphs.walk(result.tagged_exported_program.graph_module):
            for node in inner.graph.nodes:
                tag = node.meta.get(graphs.DELEGATION_TAG)
                refused = self.refuse(node, destinations.get(tag)) if tag is not None else None
                if refused is not None:
                    del node.meta[graphs.DELEGATION_TAG]
                    name = graphs.qualified_name(path, node)
                    by = type(self.partitioner).__name__
                    rejections.append(Rejection("", name, graphs.operator_name(node), refused[1], by, refused[0]))
                elif tag is not None:
                    used.add(tag)
        kept = {tag: spec for tag, spec in destinations.items() if tag in used}
        adjustments = tuple(getattr(result, "adjustments", ()))
        return ExplainedResult(result.tagged_exported_program, kept, tuple(rejections), adjustments)


def named_after(kind: type[LessPartitioner], partitioner: Partitioner) -> type[LessPartitioner]:
    """Return a class that reports call by the name of the partitioner that it wraps."""
    return type(type(partitioner).__name__, (kind,), {})
