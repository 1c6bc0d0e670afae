"""Several partitioners as one: the first claim wins, and a backend that is not available is skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import (
    Adjustment,
    DelegationSpec,
    ExplainedResult,
    InputError,
    Partitioner,
    PluginLoadError,
    Rejection,
    UnknownPluginError,
    graphs,
)
from exir_lowering.partitioners.algorithms import nested_run
from exir_lowering.plugins import registry


class ChainedPartitioner(Partitioner):  # type: ignore[misc]
    """Asks partitioners in order; each sees what the ones before it left.

    A partitioner that is not installed, and claims for a backend that is not available here, are skipped, so that the
    next partitioner gets the nodes; the plan says so. A fault of an installed partitioner is still an error.

    Args:
        partitioners: ExecuTorch Partitioners, or names of installed ones.
        backends: Backends by id that the call to `lower` will get in addition to the installed ones.
    """

    def __init__(self, *partitioners: Partitioner | str, backends: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        if not partitioners:
            raise InputError("ChainedPartitioner() got no partitioner: give at least one.")
        self.backends = backends
        self.partitioners: list[Partitioner] = []
        self._skipped: list[Adjustment] = []
        for partitioner in partitioners:
            if isinstance(partitioner, str):
                try:
                    self.partitioners.append(registry.find_partitioner(partitioner))
                except (UnknownPluginError, PluginLoadError) as error:
                    reason = f"partitioner {partitioner!r} is skipped: {error}"
                    self._skipped.append(Adjustment("", "skipped", (), reason, "ChainedPartitioner"))
            elif isinstance(partitioner, Partitioner):
                self.partitioners.append(partitioner)
            else:
                raise InputError(f"ChainedPartitioner: got {partitioner!r}, expected a Partitioner or a name.")

    def partition(self, exported_program: ExportedProgram) -> ExplainedResult:
        """Ask each partitioner in turn; PartitionerContractError if one of them breaks its contract."""
        tags: dict[Node, str] = {}
        destinations: dict[str, DelegationSpec] = {}
        rejections: dict[str, list[Rejection]] = {}
        adjustments = list(self._skipped)
        available: dict[str, str] = {}  # why a backend cannot be used, "" if it can
        for number, partitioner in enumerate(self.partitioners):
            taken = [node for node in tags if node.op == "call_function"]
            run = nested_run.run(partitioner, exported_program, taken)
            adjustments += run.adjustments
            for rejection in run.rejections:
                rejections.setdefault(rejection.node, []).append(rejection)
            missing: dict[str, list[str]] = {}
            for path, node in graphs.every_node(exported_program.graph_module):
                if node not in run.tags:
                    continue
                spec = run.destinations[run.tags[node]]
                if spec.backend_id not in available:
                    try:
                        registry.find_backend(spec.backend_id, self.backends)
                        available[spec.backend_id] = ""
                    except (UnknownPluginError, PluginLoadError) as error:
                        available[spec.backend_id] = str(error)
                if not available[spec.backend_id]:
                    tag = f"{number}:{run.tags[node]}"
                    destinations[tag] = spec
                    tags.setdefault(node, tag)
                elif graphs.is_operator(node):
                    name = graphs.qualified_name(path, node)
                    missing.setdefault(spec.backend_id, []).append(name)
                    by = type(partitioner).__name__
                    reason = f"{by} would take it for {spec.backend_id}, which is not available here"
                    found = Rejection(
                        "", name, graphs.operator_name(node), reason, "ChainedPartitioner", "backend_unavailable"
                    )
                    rejections.setdefault(name, []).append(found)
            for backend_id, names in missing.items():
                reason = f"backend {backend_id!r} is skipped: {available[backend_id]}"
                adjustments.append(Adjustment("", "skipped", tuple(names), reason, "ChainedPartitioner"))
        merged = []
        for first, *others in rejections.values():
            reason = "; ".join(dict.fromkeys(each.reason for each in (first, *others)))
            by = ", ".join(dict.fromkeys(each.by for each in (first, *others)))
            merged.append(replace(first, method="", reason=reason, by=by))
        return nested_run.tagged(exported_program, tags, destinations, merged, adjustments)

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], Callable[[Node], bool] | None]:
        """Keep from decomposition what any of the partitioners keeps."""
        return nested_run.ask_preserved(self.partitioners, ep, lambda number, node: True)
