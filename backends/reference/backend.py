"""The ahead-of-time side of the reference backend: writes partitions, with every weight once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node

from exir_lowering import (
    Backend,
    BackendContext,
    CompileSpec,
    InputError,
    Partitioner,
    PreprocessResult,
    WeightRef,
    WeightStore,
    graphs,
)
from exir_lowering.backends.reference.delegate import EDGE, FORMAT, HIGHER_ORDER, list_events
from exir_lowering.graphs import measures
from exir_lowering.graphs.operators import functions, pure as pure_operators
from exir_lowering.graphs.serialized.plain import NotSerialisableError, PlainWriter
from exir_lowering.partitioners import GraphScope, No, Support, SupportPartitioner
from exir_lowering.plugins import PROVENANCE


class ReferenceBackend(Backend):
    """Writes core ATen programs in a compact format for `ReferenceDelegate`.

    Weights are named data under the hash of their content: all partitions of all methods share one copy.
    """

    backend_id = "reference"
    version = str(FORMAT.version)
    unread = PROVENANCE

    def preprocess(
        self, program: ExportedProgram, compile_specs: list[CompileSpec], context: BackendContext | None = None
    ) -> PreprocessResult:
        """Write one partition, with the weights that it uses."""
        return _Writer(program, context.weights if context is not None else WeightStore()).pack()


class _Writer(PlainWriter):
    """Writes one partition, in the format that `delegate` describes."""

    def __init__(self, program: ExportedProgram, store: WeightStore) -> None:
        super().__init__()
        self.writers[Node] = lambda node, depth: self._values[node]
        self._program, self._store = program, store
        self._weights: dict[WeightRef, int] = {}  # with their numbers; equal ones share one
        self._graphs: list[Any] = []
        self._values: dict[Node, Any] = {}  # how arguments refer to a node

    def pack(self) -> PreprocessResult:
        # What is written under any name is state.
        lifted = {}
        for node, spec in graphs.placeholders(self._program).items():
            if spec.kind is not InputKind.USER_INPUT:
                tensor = graphs.lifted_value(self._program, spec.target)
                if not isinstance(tensor, torch.Tensor):
                    raise InputError(
                        f"Backend 'reference': {spec.target} is a {type(tensor).__name__}; weights and constants must "
                        "be tensors. Leave the operators that read it on the host."
                    )
                lifted[node] = spec.target, tensor
        written = graphs.written_state(self._program)
        mutated = {id(tensor) for target, tensor in lifted.values() if target in written}
        states: dict[int, WeightRef] = {}  # by the id of the tensor
        slots: dict[str | None, int] = {}
        for node, (target, tensor) in lifted.items():
            if id(tensor) in mutated:
                states.setdefault(id(tensor), self._store.ref(tensor))
                slots[target] = list(states).index(id(tensor))
                self._values[node] = {"state": slots[target]}
            else:
                self._values[node] = self._weight(tensor)
        self._graph(self._program.graph_module)
        outputs = []
        for spec in self._program.graph_signature.output_specs:
            if spec.kind is not OutputKind.USER_OUTPUT and spec.target not in slots:
                raise InputError(
                    f"Backend 'reference': input {spec.target} is written, and a delegate's inputs are the runtime's "
                    "own memory. Use exir_lowering.lower, which leaves the write to the host."
                    if spec.kind is OutputKind.USER_INPUT_MUTATION
                    else f"Backend 'reference': output {spec.arg} is of kind {spec.kind.name}, expected user outputs "
                    "and mutations of buffers. Export the model for inference."
                )
            outputs.append(None if spec.kind is OutputKind.USER_OUTPUT else slots[spec.target])
        content = FORMAT.pack(
            {
                "weights": [ref.to_json() for ref in self._weights],
                "states": [ref.to_json() for ref in states.values()],
                "outputs": outputs,
                "graphs": self._graphs,
            }
        )
        handles = {
            event: (handle,)
            for events, (_, code, _) in zip(list_events(self._graphs), self._graphs, strict=True)
            for event, (*_, handle) in zip(events, code, strict=True)
            if handle >= 0
        }
        named = self._store.named_data([*self._weights, *states.values()])
        return PreprocessResult(content, debug_handle_map=handles, data_store_output=named)

    def _weight(self, tensor: torch.Tensor) -> Any:
        return {"weight": self._weights.setdefault(self._store.ref(tensor), len(self._weights))}

    def _graph(self, module: GraphModule) -> int:
        """Write a graph and those that it calls, which come after it, and return its number."""
        number = len(self._graphs)
        self._graphs.append(None)
        inputs, code, nested = 0, [], dict[int, Any]()
        for node in module.graph.nodes:
            if node.op == "placeholder" and node not in self._values:
                self._values[node] = {"%": inputs}
                inputs += 1
        for node in module.graph.nodes:
            if node.op == "get_attr":
                value = graphs.attribute(module, str(node.target))
                if isinstance(value, torch.Tensor):
                    self._values[node] = self._weight(value)
                elif isinstance(value, GraphModule):
                    if id(value) not in nested:
                        nested[id(value)] = {"graph": self._graph(value)}
                    self._values[node] = nested[id(value)]
                elif node.users:
                    kind = type(value).__name__
                    raise InputError(f"Backend 'reference': {node.target} is a {kind}, expected a tensor.")
            elif node.op == "call_function":
                no = refusal(module, node)
                if no is not None:
                    operator = graphs.operator_name(node)
                    line = graphs.source_code(node)
                    raise InputError(f"{operator} is not supported by backend 'reference': {no[1]}. {line}")
                args = [self.write(value) for value in node.args]
                kwargs = {name: self.write(value) for name, value in sorted(node.kwargs.items())}
                handle = node.meta.get("debug_handle")
                code.append([function_name(node.target), args, kwargs, -1 if handle is None else int(handle)])
                self._values[node] = {"%": inputs + len(code) - 1}
        self._graphs[number] = [inputs, code, self.write(module.graph.output_node().args[0])]
        return number


_NAMES = {id(function): name for name, function in functions.FUNCTIONS.items()}
_ARGUMENTS = PlainWriter()
_ARGUMENTS.writers[Node] = lambda node, depth: None


def reference_partitioner(*, own_state: bool = True) -> Partitioner:
    """Return a partitioner that gives the reference backend everything that its delegate can execute.

    Args:
        own_state: Whether a buffer that only one partition reads and writes moves into it. State in a delegate belongs
            to one method: what several methods share, such as the KV cache of a prefill and a decode method, stays
            with the runtime. Give False if it is to be shared by name (`emit(share_state=True)`).
    """
    return SupportPartitioner({"reference": ReferenceSupport()}, own_state=own_state, rewrites={"safe"})


def executable() -> Support:
    """Return a support of what the reference delegate can execute, for a partitioner of your own."""
    return ReferenceSupport()


class ReferenceSupport(Support):
    """Supports functional operators on CPU tensors, arithmetic on sizes, and control flow over such operators."""

    def bind(self, scope: GraphScope) -> Callable[[Node], No | None]:
        """Prepare for one graph."""

        def check(node: Node) -> No | None:
            no = refusal(scope.graph_module, node)
            return No(no[0], no[1], "reference") if no is not None else None

        return check

    def __str__(self) -> str:
        return "reference"


def function_name(target: Any) -> str:
    """Return an operator's name in a payload."""
    return _NAMES.get(id(target)) or graphs.target_name(target)


def refusal(module: GraphModule, node: Node) -> tuple[str, str] | None:
    """Return why the delegate cannot execute a node, as a code and a text; None if it can."""
    no = _operator_refusal(node)
    if no is not None:
        return no
    for value in (*node.args, *node.kwargs.values()):
        if isinstance(value, torch.device) and value.type != "cpu":
            return "argument", f"it makes a tensor on device {value}; the delegate executes on the CPU"
        try:
            _ARGUMENTS.write(value)
        except NotSerialisableError:
            return "argument", f"an argument of type {type(value).__name__} ({value!r}) cannot be written to a payload"
    for source in (*node.all_input_nodes, node):
        for tensor in measures.tensors(source.meta.get("val")):
            if tensor.layout is not torch.strided or tensor.is_quantized:
                return "layout", f"{source.name} is {tensor.layout}, supported: dense tensors"
            if tensor.device.type != "cpu":
                return "device", f"{source.name} is on device {tensor.device}; the delegate executes on the CPU"
    for nested in graphs.nested_graphs(module, node):
        for inner in nested.module.graph.nodes:
            if inner.op == "call_function" and (no := refusal(nested.module, inner)) is not None:
                return no[0], f"its graph {nested.name} has {graphs.operator_name(inner)}: {no[1]}"
    return None


def _operator_refusal(node: Node) -> tuple[str, str] | None:
    name = function_name(node.target)
    if id(node.target) in _NAMES or name in EDGE or (name in HIGHER_ORDER and node.target in graphs.OPERAND_LAYOUTS):
        return None
    if graphs.is_delegate_call(node):
        return "op", "it calls another delegate"
    if name.count(".") < 2:
        kind = "higher-order operator" if hasattr(torch.ops.higher_order, name) else "Python function"
        return "op", f"the delegate does not have the {kind} {name}"
    if pure_operators.find(name) is None:
        return "op", pure_operators.why_not(name)
    return None
