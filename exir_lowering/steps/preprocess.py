"""Step preprocess: pass each backend everything it has to lower in one call, and check what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    few,
    find_named_handle,
)
from exir_lowering.fast import accelerated
from exir_lowering.graphs import checksums, debug_handles, sources
from exir_lowering.graphs.copies import list_tensors, private_copy
from exir_lowering.graphs.weights import WeightStore
from exir_lowering.model import BackendGroup, LoweredPartition, Partition
from exir_lowering.plugins.backend import Backend, BackendContext, ExecutorchBackend, context_argument
from exir_lowering.steps.conversion_context import converting, settings
from exir_lowering.steps.session import Session

_LISTED = 6  # how many nodes a message names before it only counts the rest


def preprocess(
    group: BackendGroup, backend: Backend, session: Session, *, sharing: BackendGroup | None = None
) -> list[LoweredPartition]:
    """Lower all partitions of all methods that go to a backend, in the group's order, and check what it returns.

    It gets copies of the graphs and the user's own tensors; `sharing` is a larger group whose weights share pieces.
    """
    programs = [partition.program for partition in group.partitions]
    fast = session.options.fast
    with session.progress.count(f"lower for {group.backend_id}", len(group.partitions)) as advance:
        if backend.parallel == "none":
            with locks.conversion(), converting(programs, gradients=True, fast=fast), accelerated(fast, "preprocess"):
                return _preprocess(group, backend, session.options.check_weights, advance, sharing or group)
        with settings(programs, gradients=True), accelerated(fast, "preprocess"):
            return _preprocess(group, backend, session.options.check_weights, advance, sharing or group)


def _preprocess(
    group: BackendGroup, backend: Backend, check_weights: bool, advance: Callable[[], None], sharing: BackendGroup
) -> list[LoweredPartition]:
    weights = _weights(group) if check_weights else {}
    before = checksums.digest_weights(weights)
    context = BackendContext(WeightStore(list_tensors(one.program for one in sharing.partitions)))
    try:
        if backend.one_by_one:
            lowered = _one_by_one(group, backend, context, advance)
        else:
            lowered = _all_at_once(group, backend, context, advance)
    except LoweringError as error:
        _check_unwritten(group, before, weights, error)
        raise
    _check_unwritten(group, before, weights, None)
    _check_stored(group.backend_id, context.weights, lowered)
    return lowered


def _check_unwritten(
    group: BackendGroup, before: Mapping[str, Any], weights: Mapping[str, Any], failure: LoweringError | None
) -> None:
    after = checksums.digest_weights(weights)
    changed = [name for name, digest in before.items() if after.get(name) != digest]
    if changed:
        raise BackendContractError(
            f"Backend {group.backend_id!r} wrote into {few(changed, _LISTED)} during preprocess: those tensors "
            f"belong to the model and have changed. Restore them before lowering again; a backend must work on a copy."
            + (f"\nThen it failed: {failure}" if failure is not None else "")
        ) from failure


def _one_by_one(
    group: BackendGroup, backend: Backend, context: BackendContext, advance: Callable[[], None]
) -> list[LoweredPartition]:
    lowered = []
    also = context_argument(backend.preprocess, context)
    for partition in group.partitions:
        program, specs = _copy_for(group.backend_id, backend, partition)
        try:
            result = backend.preprocess(program, specs, **also)
        except MemoryError:
            raise
        except Exception as error:
            raise describe_failure(group.backend_id, backend, [partition], error) from error
        _check_result(group.backend_id, backend, partition, result)
        lowered.append(LoweredPartition(partition, result))
        advance()
    return lowered


def _all_at_once(
    group: BackendGroup, backend: Backend, context: BackendContext, advance: Callable[[], None]
) -> list[LoweredPartition]:
    copies = {partition.id: _copy_for(group.backend_id, backend, partition) for partition in group.partitions}
    by_method: dict[str, list[Partition]] = {}
    for partition in group.partitions:
        by_method.setdefault(partition.method, []).append(partition)
    programs = {method: [copies[partition.id][0] for partition in found] for method, found in by_method.items()}
    specs = {method: [copies[partition.id][1] for partition in found] for method, found in by_method.items()}
    try:
        results = backend.preprocess_all(programs, specs, **context_argument(backend.preprocess_all, context))
    except MemoryError:
        raise
    except Exception as error:
        raise describe_failure(group.backend_id, backend, group.partitions, error) from error
    _check_results(group.backend_id, backend, by_method, results)
    found = {
        partition.id: result
        for method, partitions in by_method.items()
        for partition, result in zip(partitions, results[method], strict=True)
    }
    for _ in group.partitions:
        advance()
    return [LoweredPartition(partition, found[partition.id]) for partition in group.partitions]


def _check_stored(backend_id: str, store: WeightStore, lowered: list[LoweredPartition]) -> None:
    """Check that a result includes the weights that its payload refers to: later, the cause would be unknown."""
    returned: set[str] = set()
    for partition in lowered:
        data = partition.result.data_store_output
        for table in (data.pte_data, *data.external_data.values()) if data is not None else ():
            returned.update(table)
    forgotten = sorted(store.referred - returned)
    for partition in lowered if forgotten else ():
        payload = partition.result.processed_bytes
        keys = [key for key in forgotten if key.encode() in payload or bytes.fromhex(key) in payload]
        if keys:
            raise BackendContractError(
                f"Backend {backend_id!r} refers in its payload of partition {partition.partition.id} to named data "
                f"that it did not return: {few(keys, _LISTED)}. Return it with the payload: PreprocessResult(..., "
                "data_store_output=context.weights.named_data(refs)), with every reference in the payload."
            )


def _copy_for(backend_id: str, backend: Backend, partition: Partition) -> tuple[ExportedProgram, list[CompileSpec]]:
    """Make what the backend gets of a partition: a copy of the graph with the model's tensors, or its own copy."""
    specs = list(partition.compile_specs)
    try:
        with locks.conversion():
            own = backend.copy_program(partition.program, specs)
            copied = private_copy(partition.program, unbacked=True) if own is None else own
            if isinstance(backend, ExecutorchBackend) and isinstance(copied, ExportedProgram):
                _separate_memory(copied)
                backend.prepare(copied)
    except MemoryError:
        raise
    except Exception as error:
        raise describe_failure(backend_id, backend, [partition], error) from error
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


def _weights(group: BackendGroup) -> dict[str, Any]:
    weights: dict[str, Any] = {}
    for partition in group.partitions:
        for table in (partition.program.state_dict, partition.program.constants):
            weights.update({f"{partition.method}:{name}": tensor for name, tensor in table.items()})
    return weights


def _check_results(backend_id: str, backend: Backend, requested: Mapping[str, list[Partition]], results: Any) -> None:
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
    if result.debug_handle_map is not None and not isinstance(backend, ExecutorchBackend):
        _check_handles(backend_id, partition, result.debug_handle_map)


def _check_handles(backend_id: str, partition: Partition, handle_map: Any) -> None:
    """Check that what a backend says about its instructions refers to operators of the partition."""
    who = f"Backend {backend_id!r} returned, for partition {partition.id}, a debug_handle_map"
    if not isinstance(handle_map, Mapping):
        raise BackendContractError(
            f"{who} of type {type(handle_map).__name__}, expected a dict from instructions to debug handles."
        )
    known = debug_handles.list_handles(partition.program.graph_module)
    numbers = frozenset(known)
    for identifier, named in handle_map.items():
        for handle in debug_handles.as_tuple(named):
            if type(handle) is not int or handle not in numbers:
                raise BackendContractError(
                    f"{who} in which {identifier!r} names the debug handle {handle!r}, expected some of "
                    f"{few(map(str, known), _LISTED)}: node.meta['debug_handle'] of its operators. A profile would "
                    "show another operator's time there."
                )


def describe_failure(backend_id: str, backend: Backend, partitions: Any, error: Exception) -> LoweringError:
    """Return an error that names the backend, the line in it, the partitions, and the lines of the model."""
    lines = [f"Backend {backend_id!r} failed: {exception_text(error)}"]
    raised = sources.find_raised_at(error, getattr(backend, "details", type(backend)))
    if raised is not None and not isinstance(error, LoweringError):  # which already has the details
        lines.append(f"  raised at {raised}")
    for partition in partitions:
        nodes = [node for node in partition.program.graph.nodes if node.op == "call_function"]
        names = few((node.name for node in nodes), _LISTED)
        lines.append(f"  partition {partition.id} of method {partition.method!r}: {names}")
        lines += sources.list_lines(sources.lines_of(nodes))
    handle = find_named_handle(error)
    if handle is not None and "Source code:" not in lines[0]:
        lines[0] += _at_handle(partitions, handle)
    return BackendFailure("\n".join(lines), debug_handle=handle)


def _at_handle(partitions: Any, handle: int) -> str:
    """Return the lines of the model that a debug handle stands for, if all of them belong to one method."""
    methods = {partition.method for partition in partitions}
    nodes = (
        node
        for partition in partitions
        for _, node in graphs.every_node(partition.program.graph_module)
        if len(methods) == 1 and debug_handles.handle(node) == handle
    )
    found = sources.format_lines(sources.lines_of(nodes))
    return f" {found}" if found else ""
