"""An AOTAutograd graph as a Python function again: delegates run its partitions, PyTorch runs the rest."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node, map_arg

from exir_lowering import graphs
from exir_lowering._upstream import locks
from exir_lowering._upstream.delegates import LoweredBackendModule, named_data_contents
from exir_lowering._upstream.dynamo import boxed_code, overwritten_inputs
from exir_lowering._upstream.fakes import dim_order
from exir_lowering._upstream.operators import higher_order_name, may_rely_on_memory_order, on_host, returns_view
from exir_lowering._upstream.runtime import open_program
from exir_lowering._upstream.writing import write_call
from exir_lowering.dynamo.capture import Captured, base_of, is_host_value, results_of, sole_views
from exir_lowering.dynamo.in_pytorch import host_call, is_host_call
from exir_lowering.dynamo.logs import NotLowered, UnboundedSizes
from exir_lowering.dynamo.once import HANDLES, Cached, share
from exir_lowering.errors import (
    BackendFailure,
    BackendUnavailableError,
    LoweringError,
    exception_text,
    explained,
    find_named_handle,
)
from exir_lowering.graphs import debug_handles, sources
from exir_lowering.plugins import availability
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.pte import payloads
from exir_lowering.pte.format import Delegation
from exir_lowering.pte.value_kinds import BOOL, DOUBLE, INT, KINDS, TENSOR, Tensor, ValueSpec
from exir_lowering.runtime import contract
from exir_lowering.runtime.inputs import lay_out as lay_out_in_order, with_strides

Boxed = Callable[[list[Any]], Any]


def compile_graph(
    captured: Captured, lowered: ExportedProgram | None, delegates: Mapping[str, Any], alive: Sequence[Any] = ()
) -> Boxed:
    """Make a captured graph callable, as `make_call` does its partitions; `alive` is kept as long as that is called."""
    calls: dict[int, Call] = {}

    def call(module: LoweredBackendModule) -> Call:
        if id(module) not in calls:
            calls[id(module)] = make_call(captured.name, len(calls), module, delegates)
        return calls[id(module)]

    # The inputs of the captured graph, the lowered program, then views of its results.
    source, builder = captured.module.graph, _Builder(call)
    values, graph = builder.values, builder.graph
    graph.set_codegen(boxed_code())
    builder.add_inputs(source)
    if lowered is not None:
        users = iter(captured.inputs)
        for node, spec in graphs.placeholders(lowered).items():
            target = str(spec.target)
            if spec.kind is InputKind.USER_INPUT:
                values[node] = values[next(users)]
            elif target in captured.baked:
                values[node] = values[captured.baked[target]]
            else:
                values[node] = builder.hold(target.replace(".", "_"), graphs.lifted_value(lowered, target))
        builder.add(lowered.graph_module)
        made = results_of(lowered.graph)
        for root, value, owned in zip(captured.roots, made, _owned(made), strict=True):
            values[root] = _settle(builder, root, values[value], owned) if isinstance(value, Node) else value
    results = results_of(source)
    returned = {value: _result(value, builder) if isinstance(value, Node) else value for value in results}
    if captured.name != "backward":
        for value in sole_views(results):
            returned[value] = graph.call_function(_no_view, (returned[value],))
    bases = [base_of(value) for value in results if isinstance(value, Node)]
    for value, place in overwritten_inputs(source).items():
        if bases.count(value) == 1 and place not in bases:
            _write_in_place(returned[value], values[place])
    graph.output(tuple(returned[value] for value in results))
    run = partial(GraphModule(builder.root, graph).forward)
    run.alive = alive  # type: ignore[attr-defined]  # not in the module, which refers to itself and ends later
    return run


def _settle(builder: _Builder, root: Node, value: Any, owned: bool) -> Any:
    """Give a result the memory that AOTAutograd expects: its own, laid out as the captured graph's value."""
    expected = root.meta.get("val")
    if not isinstance(expected, torch.Tensor) or not isinstance(value, Node):
        return value
    if not owned:
        value = builder.graph.call_function(torch.ops.aten.clone.default, (value,))
    repeats = _is_known(expected.stride()) and 0 in expected.stride() and 0 not in expected.shape
    return builder.lay_out(value, expected, by_strides=not repeats)


_PUT, _PUT_IN_PLACE = torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default


def _write_in_place(result: Node, given: Node) -> None:
    """Put elements into an input itself, such as a cache, into which all of the result would be copied afterwards."""
    made: Any = result.args[0] if result.target in (with_strides, lay_out_in_order) else result
    if made.target is _PUT and made.args[0] is given and len(given.users) == 1:  # nothing else reads what was there
        made.target = _PUT_IN_PLACE


def _result(value: Node, builder: _Builder) -> Any:
    """Return a result of the captured graph, made of those of the program where it is a view."""
    if value not in builder.values and is_host_value(value):
        for source in value.all_input_nodes:
            _result(source, builder)
        builder.values[value] = builder.graph.node_copy(value, builder.values.__getitem__)
    return builder.values[value]


class _Builder:
    """Builds a graph of PyTorch's operators; `call` returns what executes the module of a delegate call."""

    def __init__(self, call: Callable[[LoweredBackendModule], Call]) -> None:
        self._call = call
        self.graph = Graph()
        self.root: dict[str, Any] = {}  # what the graph's module will hold
        self.values: dict[Node, Any] = {}  # by the nodes of other graphs, what they are in this one

    def add_inputs(self, source: Graph) -> None:
        for node in source.nodes:
            if node.op == "placeholder":
                self.values[node] = self.graph.placeholder(node.name)

    def hold(self, name: str, value: Any) -> Node:
        self.root[name] = value
        return self.graph.get_attr(name)

    def add(self, module: GraphModule) -> None:
        """Copy the operators of a lowered graph, whose inputs are there."""
        for node in module.graph.nodes:
            if node.op == "get_attr":
                value = graphs.attribute(module, str(node.target))
                if isinstance(value, GraphModule):
                    inner = _Builder(self._call)
                    inner.add_inputs(value.graph)
                    inner.add(value)
                    inner.graph.output(map_arg(value.graph.output_node().args[0], inner.values.__getitem__))
                    value = GraphModule(inner.root, inner.graph)
                if not isinstance(value, LoweredBackendModule):
                    self.values[node] = self.hold(f"held_{len(self.root)}", value)
            elif graphs.is_delegate_call(node):
                called = graphs.attribute(module, str(node.args[0].target))
                arguments = map_arg(tuple(node.args[1:]), self.values.__getitem__)
                self.values[node] = self.graph.call_function(self._call(called), arguments)
            elif node.op not in ("placeholder", "output"):
                target = on_host(node.target)
                place = self._in_memory_order if may_rely_on_memory_order(target) else self.values.__getitem__
                args, kwargs = map_arg((node.args, node.kwargs), place)
                if is_host_call(node):
                    target, kwargs = host_call(node), {}
                self.values[node] = self.graph.call_function(target, args, kwargs)

    def _in_memory_order(self, operand: Node) -> Any:
        """Return an operand as it lies in memory in its program, where views are copies, for what relies on that."""
        # PyTorch's LSTM on the CPU takes for granted that its input is contiguous.
        value, expected = self.values[operand], operand.meta.get("val")
        if not isinstance(expected, torch.Tensor):
            return value
        if _is_known(expected.stride()) and 0 in expected.stride():
            return value  # an input that repeats its elements, as it is given
        return self.lay_out(value, expected)

    def lay_out(self, value: Any, expected: torch.Tensor, *, by_strides: bool = True) -> Node:
        """Lay a value out as another one: with its strides, if they are known, or with its order of dimensions."""
        if by_strides and _is_known(expected.stride()):
            return self.graph.call_function(with_strides, (value, expected.stride()))
        return self.graph.call_function(lay_out_in_order, (value, dim_order(expected)))


def _is_known(strides: Sequence[Any]) -> bool:
    return all(isinstance(stride, int) for stride in strides)


def _owned(returned: Sequence[Any]) -> list[bool]:
    """Return which results have memory of their own: not an input's, not a constant's, and no earlier result's."""
    seen: set[Any] = set()
    found = []
    for value in returned:
        base = value
        while isinstance(base, Node) and _may_alias(base):
            base = base.args[0]
        found.append(isinstance(base, Node) and base not in seen and _makes_memory(base))
        seen.add(base)
    return found


def _may_alias(node: Node) -> bool:
    """Return whether what runs for a node of a lowered graph may return memory of its first argument."""
    if graphs.is_getitem(node):
        source: Any = node.args[0]
        return not graphs.is_delegate_call(source) and _may_alias(source)
    return node.op == "call_function" and returns_view(on_host(node.target))


def _makes_memory(node: Node) -> bool:
    maker: Any = node.args[0] if graphs.is_getitem(node) else node
    if graphs.is_delegate_call(maker):
        return True
    return maker.op == "call_function" and higher_order_name(maker.target) is None and not is_host_call(maker)


def _no_view(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same memory that is no view."""
    made = torch.empty(0, dtype=value.dtype)
    return made.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())


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
        execute, cached = _hosted(method, module, plan, values), None
    else:
        execute, cached = _delegated(method, module, plan, found, delegates.get(backend_id, type(found)))
    program.state_dict.clear()  # the payload has the weights; the program is there to name lines

    def call(*inputs: Any) -> list[Any]:
        with locks.engine(), torch.no_grad():
            return execute([change(value) for change, value in zip(prepare, inputs, strict=True)])

    call.cached = cached  # type: ignore[attr-defined]
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
) -> tuple[Execute, Cached]:
    """Let a delegate compile a payload, unless it has compiled an equal one that is in use."""
    lines = partial(_lines, module.original_module)
    named = named_data_contents(module)
    digest = hashlib.sha256()
    for part in (module.processed_bytes, *(text for key in sorted(named) for text in (key.encode(), named[key]))):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    specs = tuple((spec.key, bytes(spec.value)) for spec in module.compile_specs)
    key = (module.backend_id, id(given), digest.hexdigest(), specs)
    cached = HANDLES.get(key)
    if cached is None:
        where, content, options = _where(method), module.processed_bytes, module.compile_specs
        job = delegate, where, method, plan, content, options, named.get
        with locks.engine():
            made = Cached(contract.compile_payload(*job, lines=lines), (given, delegate))
        weakref.finalize(made, contract.destroy, made.value)
        cached = share(HANDLES, key, made)
    compiled: contract.Handle = cached.value
    handle = contract.Handle(compiled.who, compiled.delegate, compiled.content, plan, plan.counts, lines)
    count = len(plan.outputs)

    def execute(given: list[Any]) -> list[Any]:
        # Results are copied, as they may be inputs, or memory that the delegate reuses.
        returned = (value for _, value in contract.execute(handle, given, count))
        return [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in returned]

    return execute, cached


def _hosted(method: str, module: LoweredBackendModule, plan: Delegation, values: Sequence[ValueSpec]) -> Execute:
    """Let ExecuTorch's runtime set up a payload, in a program that does nothing but call it."""
    tensors = [value.content for value in values if isinstance(value.content, Tensor)]
    if any(tensor.unbound for tensor in tensors):
        raise UnboundedSizes(f"the backend {module.backend_id!r} needs static sizes")
    if len(tensors) < len(values):
        kind = next(KINDS[value.kind] for value in values if value.kind != TENSOR)
        raise NotLowered(f"a partition for {module.backend_id!r} cannot be called from here: it is called with {kind}")
    taken, payload = len(values) - len(plan.outputs), memoryview(module.processed_bytes)
    who = f"{_where(method)}: backend {module.backend_id!r}"
    program, number = module.original_module, plan.number

    def failure(what: str, error: Exception) -> BackendFailure:
        lines = _lines(program, number, error)
        return BackendFailure(f"{who} {what}: {exception_text(error)}. {lines}")

    with explained(lambda error: failure("failed to set up a payload", error)), locks.engine():
        checked = payloads.read_payload(module.backend_id, payload)
        named = named_data_contents(module) if checked is None else checked.weights
        content = write_call(module, method, tensors[:taken], tensors[taken:], named)
        run = open_program(content, None).load_method(method)

    def execute(given: list[Any]) -> list[Any]:
        with explained(lambda error: failure("failed to execute", error)):
            return list(run(given, clone_outputs=True))

    execute.content = content  # type: ignore[attr-defined]  # which the runtime reads
    return execute


def _where(method: str) -> str:
    return f"torch.compile: the {method} graph"


def _lines(program: ExportedProgram, number: int, error: BaseException) -> str:
    """Return the model's lines that a failure of a partition is about: those of the operator it names, or of all."""
    named = find_named_handle(error)
    numbers = debug_handles.number_handles(program) or {}  # equal partitions share a payload, with handles of its own
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
