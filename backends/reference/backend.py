"""The ahead-of-time side of the reference backend: writes partitions, with every weight once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def _tensor(program: ExportedProgram, target: str) -> torch.Tensor:
    value = graphs.lifted_value(program, target)
    if not isinstance(value, torch.Tensor):
        raise InputError(
            f"Backend 'reference': {target} is a {type(value).__name__}; weights and constants must be tensors. "
            "Leave the operators that read it on the host."
        )
    return value


class _Writer(PlainWriter):
    """Writes one partition, in the format that `delegate` describes."""

    def __init__(self, program: ExportedProgram, store: WeightStore) -> None:
        super().__init__()
        self.writers[Node] = lambda node, depth: self._values[node]
        self._program, self._store = program, store
        self._weights: dict[WeightRef, int] = {}  # with their numbers; equal ones share one
        self._states: dict[int, WeightRef] = {}  # by the id of the tensor
        self._graphs: list[Any] = []
        self._values: dict[Node, Any] = {}  # how arguments refer to a node

    def pack(self) -> PreprocessResult:
        slots = self._lifted()
        self._graph(self._program.graph_module)
        refs = [*self._weights, *self._states.values()]
        content = FORMAT.pack(
            {
                "weights": [ref.to_json() for ref in self._weights],
                "states": [ref.to_json() for ref in self._states.values()],
                "outputs": list(self._outputs(slots)),
                "graphs": self._graphs,
            }
        )
        handles = {
            event: (handle,)
            for events, (_, code, _) in zip(list_events(self._graphs), self._graphs, strict=True)
            for event, (*_, handle) in zip(events, code, strict=True)
            if handle >= 0
        }
        return PreprocessResult(content, debug_handle_map=handles, data_store_output=self._store.named_data(refs))

    def _lifted(self) -> dict[str, int]:
        """Number the weights and states, and return those of the states; what is written under any name is state."""
        signature = self._program.graph_signature
        placeholders = [node for node in self._program.graph.nodes if node.op == "placeholder"]
        lifted = {
            node: (spec.target, _tensor(self._program, spec.target))
            for node, spec in zip(placeholders, signature.input_specs, strict=True)
            if spec.kind is not InputKind.USER_INPUT
        }
        written = graphs.written_state(self._program)
        mutated = {id(tensor) for target, tensor in lifted.values() if target in written}
        slots: dict[str, int] = {}
        for node, (target, tensor) in lifted.items():
            if id(tensor) in mutated:
                self._states.setdefault(id(tensor), self._store.ref(tensor))
                slots[target] = list(self._states).index(id(tensor))
                self._values[node] = {"state": slots[target]}
            else:
                self._values[node] = self._weight(tensor)
        return slots

    def _weight(self, tensor: torch.Tensor) -> Any:
        return {"weight": self._weights.setdefault(self._store.ref(tensor), len(self._weights))}

    def _outputs(self, slots: dict[str, int]) -> Iterator[int | None]:
        for spec in self._program.graph_signature.output_specs:
            if spec.kind is OutputKind.USER_OUTPUT:
                yield None
            elif spec.target in slots:
                yield slots[spec.target]
            elif spec.kind is OutputKind.USER_INPUT_MUTATION:
                raise InputError(
                    f"Backend 'reference': input {spec.target} is written, and a delegate's inputs are the runtime's "
                    "own memory. Use exir_lowering.lower, which leaves the write to the host."
                )
            else:
                raise InputError(
                    f"Backend 'reference': output {spec.arg} is of kind {spec.kind.name}, expected user outputs and "
                    "mutations of buffers. Export the model for inference."
                )

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
                self._attribute(module, node, nested)
            elif node.op == "call_function":
                code.append(self._instruction(module, node))
                self._values[node] = {"%": inputs + len(code) - 1}
        self._graphs[number] = [inputs, code, self.write(module.graph.output_node().args[0])]
        return number

    def _attribute(self, module: GraphModule, node: Node, nested: dict[int, Any]) -> None:
        value = graphs.attribute(module, str(node.target))
        if isinstance(value, torch.Tensor):
            self._values[node] = self._weight(value)
        elif isinstance(value, GraphModule):
            if id(value) not in nested:
                nested[id(value)] = {"graph": self._graph(value)}
            self._values[node] = nested[id(value)]
        elif node.users:
            raise InputError(f"Backend 'reference': {node.target} is a {type(value).__name__}, expected a tensor.")

    def _instruction(self, module: GraphModule, node: Node) -> list[Any]:
        no = refusal(module, node)
        if no is not None:
            raise InputError(
                f"{graphs.operator_name(node)} is not supported by backend 'reference': {no[1]}. "
                + graphs.source_code(node)
            )
        args = [self.write(value) for value in node.args]
        kwargs = {name: self.write(value) for name, value in sorted(node.kwargs.items())}
        handle = node.meta.get("debug_handle")
        return [function_name(node.target), args, kwargs, -1 if handle is None else int(handle)]


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
    return SupportPartitioner({"reference": ReferenceSupport()}, own_state=own_state)


def executable() -> Support:
    """Support what the reference delegate can execute.

    Returns:
        The support, for a partitioner of your own.
    """
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
    no = _operator_refusal(node) or _argument_refusal(node) or _tensor_refusal(node)
    if no is not None:
        return no
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
    if name not in _registered(name):
        return "op", f"{name} is not registered in torch"
    if graphs.is_mutating(node):
        return "op", f"{name} writes into its arguments; the delegate executes functional operators"
    if pure_operators.find(name) is None:
        return "op", pure_operators.why_not(name)
    return None


def _registered(name: str) -> frozenset[str]:
    """Return the operators that torch knows, including those of libraries that were imported later."""
    known = graphs.known_operators()
    if name not in known:
        graphs.known_operators.cache_clear()
        known = graphs.known_operators()
    return known


def _argument_refusal(node: Node) -> tuple[str, str] | None:
    for value in (*node.args, *node.kwargs.values()):
        if isinstance(value, torch.device) and value.type != "cpu":
            return "argument", f"it makes a tensor on device {value}; the delegate executes on the CPU"
        try:
            _ARGUMENTS.write(value)
        except NotSerialisableError:
            return "argument", f"an argument of type {type(value).__name__} ({value!r}) cannot be written to a payload"
    return None


def _tensor_refusal(node: Node) -> tuple[str, str] | None:
    for source in (*node.all_input_nodes, node):
        for tensor in measures.tensors(source.meta.get("val")):
            if tensor.layout is not torch.strided or tensor.is_quantized:
                return "layout", f"{source.name} is {tensor.layout}, supported: dense tensors"
            if tensor.device.type != "cpu":
                return "device", f"{source.name} is on device {tensor.device}; the delegate executes on the CPU"
    return None
