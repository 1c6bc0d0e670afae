"""Step preprocess: pass each backend everything it has to lower in one call, and check what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from executorch.exir.backend.backend_details import PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering._upstream import locks
from exir_lowering._upstream.tensors import is_readable
from exir_lowering.errors import (
    BackendContractError,
    BackendFailure,
    LoweringError,
    exception_text,
    explained,
    few,
    find_named_handle,
)
from exir_lowering.fast import accelerated
from exir_lowering.graphs import checksums, debug_handles, sources
from exir_lowering.graphs.copies import list_tensors, private_copy
from exir_lowering.graphs.weights import WeightStore
from exir_lowering.model import BackendGroup, LoweredPartition, Partition
from exir_lowering.plugins.availability import installation
from exir_lowering.plugins.backend import Backend, BackendContext, ExecutorchBackend, context_argument
from exir_lowering.steps.conversion_context import converting, settings
from exir_lowering.steps.session import Session

_LISTED = 6  # how many nodes a message names before it only counts the rest


def preprocess(
    group: BackendGroup, backend: Backend, session: Session, *, sharing: BackendGroup | None = None
) -> list[LoweredPartition]:
    """Lower a backend's partitions, in the group's order, and check what it returns; `sharing` is a larger group."""
    programs, fast, shared = [one.program for one in group.partitions], session.options.fast, backend.parallel != "none"
    store = WeightStore(list_tensors(one.program for one in (sharing or group).partitions))
    lower = _one_by_one if backend.one_by_one else _all_at_once
    tracing = settings(programs, gradients=True) if shared else converting(programs, gradients=True, fast=fast)
    advance = session.progress.count(f"lower for {group.backend_id}", len(group.partitions))
    with tracing, accelerated(fast, "preprocess"):
        weights = {
            f"{partition.method}:{name}": tensor
            for partition in (group.partitions if session.options.check_weights else ())
            for table in (partition.program.state_dict, partition.program.constants)
            for name, tensor in table.items()
        }
        before = checksums.digest_weights(weights)
        try:
            lowered = lower(group, backend, BackendContext(store), advance)
        except LoweringError as error:
            _check_unchanged(group.backend_id, weights, before, error)
            raise
        _check_unchanged(group.backend_id, weights, before)
        _check_stored(group.backend_id, store, lowered)
    return lowered


def _check_unchanged(
    backend_id: str, weights: Mapping[str, Any], before: Mapping[str, Any], failure: LoweringError | None = None
) -> None:
    after = checksums.digest_weights(weights)
    changed = [name for name, digest in before.items() if after.get(name) != digest]
    if changed:
        raise BackendContractError(
            f"Backend {backend_id!r} wrote into {few(changed, _LISTED)} during preprocess: those tensors "
            "belong to the model and have changed. Restore them before lowering again; a backend must work on a "
            "copy." + (f"\nThen it failed: {failure}" if failure is not None else "")
        ) from failure


def _one_by_one(
    group: BackendGroup, backend: Backend, context: BackendContext, advance: Callable[[], None]
) -> list[LoweredPartition]:
    lowered = []
    also = context_argument(backend.preprocess, context)
    for partition in group.partitions:
        program, specs = _copy_for(group.backend_id, backend, partition)
        with explained(partial(describe_failure, group.backend_id, backend, [partition])):
            result = backend.preprocess(program, specs, **also)
        _check_result(group.backend_id, backend, partition, result)
        lowered.append(LoweredPartition(partition, result))
        advance()
    return lowered


def _all_at_once(
    group: BackendGroup, backend: Backend, context: BackendContext, advance: Callable[[], None]
) -> list[LoweredPartition]:
    given: dict[str, list[tuple[Partition, ExportedProgram, list[CompileSpec]]]] = {}
    for one in group.partitions:
        given.setdefault(one.method, []).append((one, *_copy_for(group.backend_id, backend, one)))
    programs = {method: [program for _, program, _ in found] for method, found in given.items()}
    specs = {method: [spec for *_, spec in found] for method, found in given.items()}
    with explained(partial(describe_failure, group.backend_id, backend, group.partitions)):
        results = backend.preprocess_all(programs, specs, **context_argument(backend.preprocess_all, context))
    requested = {method: [one for one, *_ in found] for method, found in given.items()}
    found = _check_results(group.backend_id, backend, requested, results)
    for _ in group.partitions:
        advance()
    return [LoweredPartition(one, found[one.id]) for one in group.partitions]


def _check_stored(backend_id: str, store: WeightStore, lowered: list[LoweredPartition]) -> None:
    """Check that a result includes the weights that its payload refers to: later, the cause would be unknown."""
    returned: set[str] = set()
    for data in (one.result.data_store_output for one in lowered):
        for table in (data.pte_data, *data.external_data.values()) if data is not None else ():
            returned.update(table)
    forgotten = sorted(store.referred - returned)
    for one in lowered if forgotten else ():
        payload = one.result.processed_bytes
        keys = [key for key in forgotten if key.encode() in payload or bytes.fromhex(key) in payload]
        if keys:
            raise BackendContractError(
                f"Backend {backend_id!r} refers in its payload of partition {one.partition.id} to named data "
                f"that it did not return: {few(keys, _LISTED)}. Return it with the payload: PreprocessResult(..., "
                "data_store_output=context.weights.named_data(refs)), with every reference in the payload."
            )


def _copy_for(backend_id: str, backend: Backend, partition: Partition) -> tuple[ExportedProgram, list[CompileSpec]]:
    """Make what the backend gets of a partition: a copy of the graph with the model's tensors, or its own copy."""
    specs = list(partition.compile_specs)
    with explained(partial(describe_failure, backend_id, backend, [partition])), locks.conversion():
        own = backend.copy_program(partition.program, specs)
        copied = private_copy(partition.program, unbacked=True) if own is None else own
        if isinstance(backend, ExecutorchBackend) and isinstance(copied, ExportedProgram):
            _separate_memory(copied)
            backend.prepare(copied)
    if own is not None and not isinstance(own, ExportedProgram):
        raise BackendContractError(
            f"Backend {backend_id!r} returned a {type(own).__name__} as its copy of partition {partition.id}, expected "
            f"an ExportedProgram."
        )
    return copied, specs


def _separate_memory(program: ExportedProgram) -> None:
    """Give weights that are parts of larger memory their own: ExecuTorch's classes write the memory as a whole."""
    for table in (program.state_dict, program.constants):
        for name, value in table.items():
            if is_readable(value) and value.untyped_storage().nbytes() != value.nbytes:
                own = value.detach().clone()
                table[name] = torch.nn.Parameter(own, value.requires_grad) if type(value) is not torch.Tensor else own


def _check_results(
    backend_id: str, backend: Backend, requested: Mapping[str, list[Partition]], results: Any
) -> dict[str, PreprocessResult]:
    """Return the results by partition; BackendContractError if they are not those that were requested."""
    who = f"Backend {backend_id!r}: preprocess_all"
    if not isinstance(results, Mapping):
        raise BackendContractError(
            f"{who} returned {type(results).__name__}, expected a dict with a list of PreprocessResult per method."
        )
    missing, strange = sorted(set(requested) - set(results)), sorted(map(str, set(results) - set(requested)))
    if missing or strange:
        raise BackendContractError(
            f"{who} returned results for methods {sorted(map(str, results))}, expected {sorted(requested)}"
            + (f"; missing: {missing}" if missing else "")
            + (f"; not requested: {strange}" if strange else "")
            + "."
        )
    found: dict[str, PreprocessResult] = {}
    for method, partitions in requested.items():
        given = results[method]
        if not isinstance(given, (list, tuple)) or len(given) != len(partitions):
            count = len(given) if isinstance(given, (list, tuple)) else type(given).__name__
            raise BackendContractError(
                f"{who} returned {count} results for method {method!r}, expected {len(partitions)}, one for each of "
                f"{few((each.id for each in partitions), _LISTED)}."
            )
        for partition, result in zip(partitions, given, strict=True):
            _check_result(backend_id, backend, partition, result)
            found[partition.id] = result
    return found


def _check_result(backend_id: str, backend: Backend, partition: Partition, result: Any) -> None:
    if not isinstance(result, PreprocessResult):
        raise BackendContractError(
            f"Backend {backend_id!r} returned {type(result).__name__} for partition {partition.id}, expected a "
            f"PreprocessResult."
        )
    if not isinstance(result.processed_bytes, bytes):
        raise BackendContractError(
            f"Backend {backend_id!r} returned processed_bytes of type {type(result.processed_bytes).__name__} for "
            f"partition {partition.id}, expected bytes."
        )
    # ExecuTorch accepts any map from its own classes; their handles may be of programs that the backends made.
    given = result.debug_handle_map
    if given is None or isinstance(backend, ExecutorchBackend):
        return
    who = f"Backend {backend_id!r} returned, for partition {partition.id}, a debug_handle_map"
    if not isinstance(given, Mapping):
        raise BackendContractError(
            f"{who} of type {type(given).__name__}, expected a dict from instructions to debug handles."
        )
    handles = (debug_handles.handle(node) for _, node in graphs.every_node(partition.program.graph_module))
    known = sorted({handle for handle in handles if handle is not None})
    for identifier, handle in ((one, each) for one, named in given.items() for each in debug_handles.as_tuple(named)):
        if type(handle) is not int or handle not in known:
            raise BackendContractError(
                f"{who} in which {identifier!r} names the debug handle {handle!r}, expected some of "
                f"{few(map(str, known), _LISTED)}: node.meta['debug_handle'] of its operators. A profile would show "
                "another operator's time there."
            )


def describe_failure(backend_id: str, backend: Backend, partitions: Any, error: Exception) -> LoweringError:
    """Return an error that names the backend, the line in it, the partitions, and the lines of the model."""
    lines = [f"Backend {backend_id!r} failed: {exception_text(error)}"]
    raised = sources.raised_at(error, getattr(backend, "details", type(backend)), "  raised at ")
    if raised and not isinstance(error, LoweringError):  # which already has the details
        lines.append(raised)
    if (how := installation(backend_id)) and (isinstance(error, ImportError) or "installed" in lines[0]):
        lines.append(f"  Install what the backend needs{how}")
    for partition in partitions:
        nodes = [node for node in partition.program.graph.nodes if node.op == "call_function"]
        names = few((node.name for node in nodes), _LISTED)
        lines.append(f"  partition {partition.id} of method {partition.method!r}: {names}")
        lines += sources.list_lines(sources.lines_of(nodes))
    handle, methods = find_named_handle(error), {partition.method for partition in partitions}
    if handle is not None and "Source code:" not in lines[0] and len(methods) == 1:
        every = (node for one in partitions for _, node in graphs.every_node(one.program.graph_module))
        found = sources.format_lines(sources.lines_of(node for node in every if debug_handles.handle(node) == handle))
        lines[0] += f" {found}" if found else ""
    return BackendFailure("\n".join(lines), debug_handle=handle)
