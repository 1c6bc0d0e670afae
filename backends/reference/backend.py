"""The ahead-of-time side of the reference backend: writes partitions, with every weight once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
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
from exir_lowering.backends.reference import blob
from exir_lowering.backends.reference.blob import Graph, GraphRef, Instruction, Program, ValueRef
from exir_lowering.backends.reference.support import function_name, refusal
from exir_lowering.plugins import PROVENANCE

__all__ = ["ReferenceBackend"]


class ReferenceBackend(Backend):
    """Writes core ATen programs in a compact format for `ReferenceDelegate`.

    Weights are named data under the hash of their content: all partitions of all methods share one copy.
    """

    backend_id = "reference"
    version = str(blob.VERSION)
    unread = PROVENANCE

    def preprocess(
        self, program: ExportedProgram, compile_specs: list[CompileSpec], context: BackendContext | None = None
    ) -> PreprocessResult:
        """Write one partition, with the weights that it uses."""
        return _Writer(program, context.weights if context is not None else WeightStore()).write()


def _lifted(program: ExportedProgram) -> list[tuple[Node, Any]]:
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    pairs = zip(placeholders, program.graph_signature.input_specs, strict=True)
    return [(node, spec) for node, spec in pairs if spec.kind is not InputKind.USER_INPUT]


def _tensor(program: ExportedProgram, target: str) -> torch.Tensor:
    value = program.state_dict.get(target, program.constants.get(target))
    if not isinstance(value, torch.Tensor):
        raise InputError(
            f"Backend 'reference': {target} is a {type(value).__name__}; weights and constants must be tensors. "
            "Leave the operators that read it on the host."
        )
    return value


@dataclass
class _Writer:
    """Writes one partition."""

    program: ExportedProgram
    store: WeightStore
    tensors: list[WeightRef] = field(default_factory=list)
    numbers: dict[Any, int] = field(default_factory=dict)
    graphs: list[Graph | None] = field(default_factory=list)
    modules: dict[int, int] = field(default_factory=dict)

    def write(self) -> PreprocessResult:
        inputs, states, slots = self._inputs()
        self._graph(self.program.graph_module)
        written = Program(
            tensors=self.tensors,
            states=states,
            inputs=inputs,
            outputs=list(self._outputs(slots)),
            graphs=[graph for graph in self.graphs if graph is not None],
        )
        handles: dict[str, tuple[int, ...]] = {}
        first = 0
        for graph in written.graphs:
            named = zip(blob.events(graph, first), graph.code, strict=True)
            handles |= {event: (i.handle,) for event, i in named if i.handle >= 0}
            first += len(graph.code)
        return PreprocessResult(
            blob.dump(written),
            debug_handle_map=handles,
            data_store_output=self.store.named_data(self.tensors),
        )

    def _inputs(self) -> tuple[list[list[Any]], list[int], dict[str, int]]:
        """Classify the placeholders; a tensor that is written under any of its names is state."""
        signature = self.program.graph_signature
        lifted = {spec.target: _tensor(self.program, spec.target) for _, spec in _lifted(self.program)}
        mutations = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
        mutated = {id(lifted[spec.target]) for spec in signature.output_specs if spec.kind in mutations}
        inputs: list[list[Any]] = []
        states: list[int] = []
        slots: dict[str, int] = {}
        for spec in signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                inputs.append(["user"])
                continue
            tensor = lifted[spec.target]
            if id(tensor) not in mutated:
                inputs.append(["tensor", self._number(tensor)])
                continue
            number = self._number(tensor, state=True)
            if number not in states:
                states.append(number)
            slots[spec.target] = states.index(number)
            inputs.append(["state", slots[spec.target]])
        return inputs, states, slots

    def _outputs(self, slots: dict[str, int]) -> Iterator[list[Any]]:
        signature = self.program.graph_signature
        for spec in signature.output_specs:
            if spec.kind is OutputKind.USER_OUTPUT:
                yield ["user"]
            elif spec.target in slots:
                yield ["state", slots[spec.target]]
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

    def _number(self, tensor: torch.Tensor, *, state: bool = False) -> int:
        """Return a tensor's number; equal weights share one, each state has its own."""
        ref = self.store.ref(tensor)
        key = id(tensor) if state else ref
        if key not in self.numbers:
            self.numbers[key] = len(self.tensors)
            self.tensors.append(ref)
        return self.numbers[key]

    def _graph(self, module: GraphModule) -> int:
        """Write a graph and those that it calls, each only once, and return its number."""
        if id(module) in self.modules:
            return self.modules[id(module)]
        number = self.modules[id(module)] = len(self.graphs)
        self.graphs.append(None)  # a placeholder: the program comes first
        nodes = list(module.graph.nodes)
        values: dict[Node, Any] = {}
        inputs = [node for node in nodes if node.op == "placeholder"]
        constants: list[int] = []
        for node in inputs:
            values[node] = ValueRef(len(values))
        for node in nodes:
            if node.op == "get_attr" and isinstance(tensor := graphs.attribute(module, str(node.target)), torch.Tensor):
                values[node] = ValueRef(len(values))
                constants.append(self._number(tensor))
        code: list[Instruction] = []
        for node in nodes:
            if node.op == "get_attr" and node not in values:
                self._nested(module, node, values)
            elif node.op == "call_function":
                code.append(self._instruction(module, node, values))
                values[node] = ValueRef(len(inputs) + len(constants) + len(code) - 1)
        results = torch.fx.map_arg(module.graph.output_node().args[0], values.__getitem__)
        self.graphs[number] = Graph(len(inputs), constants, code, results)
        return number

    def _nested(self, module: GraphModule, node: Node, values: dict[Node, Any]) -> None:
        value = graphs.attribute(module, str(node.target))
        if isinstance(value, GraphModule):
            values[node] = GraphRef(self._graph(value))
        elif node.users:
            raise InputError(f"Backend 'reference': {node.target} is a {type(value).__name__}, expected a tensor.")

    def _instruction(self, module: GraphModule, node: Node, values: dict[Node, Any]) -> Instruction:
        no = refusal(module, node)
        if no is not None:
            raise InputError(
                f"{graphs.operator_name(node)} is not supported by backend 'reference': {no[1]}. "
                + graphs.source_code(node)
            )
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
        handle = node.meta.get("debug_handle")
        return Instruction(
            function_name(node.target), list(args), dict(sorted(kwargs.items())), -1 if handle is None else int(handle)
        )
