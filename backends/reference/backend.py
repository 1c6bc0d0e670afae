"""The ahead-of-time side of the reference backend: writes partitions, with every weight once."""

from __future__ import annotations

from collections.abc import Iterator
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
    PreprocessResult,
    WeightRef,
    WeightStore,
    graphs,
)
from exir_lowering.backends.reference.payload import FORMAT, list_events
from exir_lowering.backends.reference.support import function_name, refusal
from exir_lowering.graphs.serialized.plain import PlainWriter
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
    """Writes one partition, in the format that `payload` describes."""

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
