"""The partitions of a compiled graph, executed in this process: by a delegate, or by ExecuTorch's runtime."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream import locks
from exir_lowering._upstream.delegates import LoweredBackendModule, named_data_contents
from exir_lowering._upstream.fakes import dim_order
from exir_lowering.dynamo.capture import NotLowered, UnboundedSizes
from exir_lowering.dynamo.once import HANDLES, Kept, numbers_of_handles
from exir_lowering.errors import BackendFailure, BackendUnavailableError, LoweringError, find_named_handle
from exir_lowering.errors.interrupts import let_through
from exir_lowering.graphs import debug_handles, sources
from exir_lowering.plugins import availability
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.pte.code import Payload
from exir_lowering.pte.format import Delegation
from exir_lowering.pte.value_kinds import BOOL, DOUBLE, INT, TENSOR, Tensor, ValueSpec
from exir_lowering.runtime import contract
from exir_lowering.runtime.interpreter.hosted import NotHosted, host

Call = Callable[..., list[Any]]
Execute = Callable[[list[Any]], list[Any]]


def make_call(method: str, number: int, module: LoweredBackendModule, delegates: Mapping[str, Any]) -> Call:
    """Return what executes a partition, for its user inputs; LoweringError or NotLowered if nothing here can."""
    backend_id, program = module.backend_id, module.original_module
    found = find_executor(backend_id, delegates)
    inputs, results = graphs.user_inputs(program), list(program.graph.output_node().args[0])
    prepare = [_preparation(node) for node in inputs]
    values = [_value_spec(node) for node in (*inputs, *results)]
    outputs = tuple(values[len(inputs) :])
    plan = Delegation(number, backend_id, len(module.processed_bytes), len(values), outputs, (len(results),))
    if found is None:
        execute, kept = _hosted(method, module, plan, values), None
    else:
        execute, kept = _delegated(method, module, plan, found, delegates.get(backend_id, type(found)))
    program.state_dict.clear()  # the payload has the weights; the program is there to name lines

    def call(*inputs: Any) -> list[Any]:
        with locks.engine(), torch.no_grad():
            return execute([change(value) for change, value in zip(prepare, inputs, strict=True)])

    call.kept = kept  # type: ignore[attr-defined]
    call.__name__ = f"{backend_id}_{number}"
    call.__module__ = "exir_lowering.partitions"
    return call


def find_executor(backend_id: str, delegates: Mapping[str, Any]) -> Delegate | None:
    """Return the delegate for a backend's payloads, None for ExecuTorch's runtime; LoweringError for neither."""
    found = availability.executor(backend_id, delegates)
    if isinstance(found, availability.Missing):
        raise BackendUnavailableError(
            f"The backend {backend_id!r} cannot execute here, as {found.reason}. {found.advice}"
        )
    return found


def is_hosted(backend_id: str, delegates: Mapping[str, Any]) -> bool:
    """Return whether ExecuTorch's runtime executes a backend's payloads."""
    try:
        return find_executor(backend_id, delegates) is None
    except LoweringError:  # what that means is said when it is needed
        return False


def _delegated(
    method: str, module: LoweredBackendModule, plan: Delegation, delegate: Delegate, given: Any
) -> tuple[Execute, Kept]:
    """Let a delegate compile a payload, unless it has compiled an equal one that is in use."""
    lines = partial(_lines, module.original_module)
    named = named_data_contents(module)
    digest = hashlib.sha256()
    for part in (module.processed_bytes, *(text for key in sorted(named) for text in (key.encode(), named[key]))):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    key = (module.backend_id, id(given), digest.hexdigest(), _specs(module))
    kept = HANDLES.read(key)
    if kept is None:
        where, content, options = _where(method), module.processed_bytes, module.compile_specs
        job = contract.Compilation(where, method, plan, content, options, named.get, lines=lines)
        with locks.engine():
            made = Kept(contract.compile_payload(delegate, job), (given, delegate))
        weakref.finalize(made, contract.destroy, made.value)
        kept = HANDLES.write(key, made)
    compiled: contract.Handle = kept.value
    handle = contract.Handle(compiled.who, compiled.delegate, compiled.content, plan, plan.counts, lines)
    count = len(plan.outputs)

    def execute(given: list[Any]) -> list[Any]:
        # Results are copied, as they may be inputs, or memory that the delegate reuses.
        returned = (value for _, value in contract.execute(handle, given, count))
        return [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in returned]

    return execute, kept


def _hosted(method: str, module: LoweredBackendModule, plan: Delegation, values: Sequence[ValueSpec]) -> Execute:
    """Let ExecuTorch's runtime set up a payload, in a separate program."""
    for value in values:
        if isinstance(value.content, Tensor) and value.content.unbound:
            raise UnboundedSizes(f"the backend {module.backend_id!r} needs static sizes")
    payload = Payload(module.backend_id, memoryview(module.processed_bytes), _specs(module))
    named = {key: memoryview(content) for key, content in named_data_contents(module).items()}
    who = f"{_where(method)}: backend {module.backend_id!r}"
    program, number = module.original_module, plan.number

    def failure(what: str, error: Exception) -> BackendFailure:
        lines = _lines(program, number, error)
        return BackendFailure(f"{who} {what}: {type(error).__name__}: {error}. {lines}")

    try:
        with locks.engine():
            hosted = host(method, payload, plan, values, named, None)
    except NotHosted as error:
        raise NotLowered(f"a partition for {module.backend_id!r} cannot be called from here: {error}") from error
    except Exception as error:
        let_through(error)
        raise failure("failed to set up a payload", error) from error

    def execute(given: list[Any]) -> list[Any]:
        try:
            return list(hosted.run(given, clone_outputs=True))
        except Exception as error:
            let_through(error)
            raise failure("failed to execute", error) from error

    return execute


def _specs(module: LoweredBackendModule) -> tuple[tuple[str, bytes], ...]:
    return tuple((spec.key, bytes(spec.value)) for spec in module.compile_specs)


def _where(method: str) -> str:
    return f"torch.compile: the {method} graph"


def _lines(program: ExportedProgram, number: int, error: BaseException) -> str:
    """Return the model's lines that a failure of a partition is about: those of the operator it names, or of all."""
    named = find_named_handle(error)
    numbers = numbers_of_handles(program) or {}  # equal partitions share a payload, with handles of its own
    named = next((handle for handle, number in numbers.items() if number == named), None if numbers else named)
    nodes = [node for _, node in graphs.every_node(program.graph_module) if node.op == "call_function"]
    chosen = [node for node in nodes if named is not None and debug_handles.handle(node) == named]
    return sources.format_lines(sources.lines_of(chosen or nodes))


def _value_spec(node: Node) -> ValueSpec:
    """Describe a value of a partition, as its file would."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        kinds = ((bool, BOOL), (torch.SymBool, BOOL), (int, INT), (torch.SymInt, INT))
        return ValueSpec(next((kind for type_, kind in kinds if isinstance(value, type_)), DOUBLE), 0)
    unbound = not all(isinstance(size, int) for size in value.shape)
    sizes = tuple(size if isinstance(size, int) else 0 for size in value.shape)
    return ValueSpec(TENSOR, Tensor(value.dtype, sizes, _order(value), dynamic=False, unbound=unbound))


def _order(value: torch.Tensor) -> tuple[int, ...]:
    """Return a value's dimensions from outer to inner: as they come, or channels last, the two that delegates take."""
    order = dim_order(value)
    return order if order in ((0, 2, 3, 1), (0, 2, 3, 4, 1)) else tuple(range(len(order)))


def _preparation(node: Node) -> Callable[[Any], Any]:
    """Return what makes a value of the graph one that a partition takes: plain, and in memory as its program says."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return lambda given: given
    order = _order(value)
    last = tuple(sorted(range(len(order)), key=order.__getitem__))
    plain = order == tuple(range(len(order)))

    def prepare(given: Any) -> Any:
        if type(given) is not torch.Tensor:  # a parameter, whose writes would not be noticed
            given = given.detach()
        return given.contiguous() if plain else given.permute(order).contiguous().permute(last)

    return prepare
