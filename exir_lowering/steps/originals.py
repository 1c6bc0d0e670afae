"""Partitions' original graphs, kept as payloads of the backend `reference` where their own backend may be missing."""

from __future__ import annotations

from collections.abc import Mapping

from executorch.exir import ExecutorchProgramManager
from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering._upstream.delegates import add_named_data, named_data
from exir_lowering.errors import InputError, LoweringError
from exir_lowering.model import BackendGroup, CallSite, Partition
from exir_lowering.options import LoweringOptions
from exir_lowering.plugins import registry
from exir_lowering.pte.payloads import ORIGINALS as BACKEND, original_key
from exir_lowering.steps.preprocess import preprocess
from exir_lowering.steps.session import Session


def attach(programs: Mapping[str, ExportedProgram]) -> None:
    """Add its original graph to each delegate of private copies, except to those that are such graphs themselves."""
    sites = {
        (method, number): (path, module, name)
        for method, program in programs.items()
        for number, (path, module, name) in enumerate(graphs.delegates(program.graph_module))
        if getattr(module, name).backend_id != BACKEND
    }
    partitions = []
    for (method, number), (path, module, name) in sites.items():
        original = graphs.copy_program(getattr(module, name).original_module)
        site = CallSite(method, path, name, (), ())
        partitions.append(Partition(original_key(method, number), method, "", BACKEND, (), original, site))
    if not partitions:
        return
    try:
        session = Session(LoweringOptions(check_weights=False))
        kept = preprocess(BackendGroup(BACKEND, tuple(partitions)), registry.find_backend(BACKEND), session)
    except LoweringError as error:
        raise InputError(f"keep_originals: a partition's graph cannot be kept in the file. {error}") from error
    for (_, module, name), lowered in zip(sites.values(), kept, strict=True):
        graph = named_data({lowered.partition.id: lowered.result.processed_bytes}, 1)
        weights = lowered.result.data_store_output
        setattr(module, name, add_named_data(getattr(module, name), weights, graph))


def check_numbers(programs: Mapping[str, ExportedProgram], manager: ExecutorchProgramManager) -> None:
    """Check that a file numbers its delegates as the originals are numbered: passes may have changed the calls."""
    plans = {plan.name: plan for plan in manager.executorch_program.execution_plan}
    for method, program in programs.items():
        expected = [getattr(module, name).backend_id for _, module, name in graphs.delegates(program.graph_module)]
        emitted = [delegate.id for delegate in plans[method].delegates]
        if emitted != expected:
            raise InputError(
                f"keep_originals: method {method!r} was emitted with the delegates {emitted}, expected {expected}: a "
                "pass of the config changed the calls, so the kept graphs would belong to other delegates. Remove "
                "keep_originals or the pass."
            )
