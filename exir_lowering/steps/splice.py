"""Step splice: put what the backends made at the call sites of the partitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce

from torch.export import ExportedProgram

from exir_lowering._upstream.delegates import LoweredBackendModule, delegate_info
from exir_lowering.errors import InvariantError
from exir_lowering.graphs import attribute
from exir_lowering.model import ExtractedMethod, LoweredPartition


def splice(methods: Iterable[ExtractedMethod], lowered: Mapping[str, LoweredPartition]) -> dict[str, ExportedProgram]:
    """Replace the pending delegates of methods after their last extraction by the lowered ones, by id, in place."""
    programs: dict[str, ExportedProgram] = {}
    for method in methods:
        for partition in method.partitions:
            if partition.id not in lowered:
                raise InvariantError(f"Partition {partition.id} was never lowered. Please report this program.")
            owner = reduce(attribute, partition.site.graph_path, method.program.graph_module)
            setattr(owner, partition.site.target, delegate(lowered[partition.id]))
        programs[method.name] = method.program
    return programs


def delegate(lowered: LoweredPartition) -> LoweredBackendModule:
    """Make ExecuTorch's module for a lowered partition."""
    partition, result = lowered.partition, lowered.result
    module = LoweredBackendModule(
        edge_program=partition.program,
        backend_id=partition.backend_id,
        processed_bytes=result.processed_bytes,
        compile_specs=list(partition.compile_specs),
        named_data_store_output=result.data_store_output,
    )
    module.meta = {"debug_handle_map": result.debug_handle_map}
    if (info := delegate_info(result)) is not None:
        module.meta["_delegate_info_meta"] = info
    return module
