"""The program of one partition: its placeholders in order, its constants, its nodes, its signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram, ExportGraphSignature
from torch.export.graph_signature import (
    ArgumentSpec,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Node

from exir_lowering._upstream.programs import (
    DelegatedProgram,
    assemble_program,
    fake_mode_of,
    in_order_of_inputs,
    lazy_graph_module,
)
from exir_lowering.graphs import DELEGATION_TAG, LIFTED_ORDER, attribute, copy_graph_module, strip_tags
from exir_lowering.graphs.quotient import Unit


@dataclass
class PartitionBuilder:
    """Builds the program of one unit."""

    owner: ExportedProgram  # from which the unit is taken
    module: GraphModule  # the graph in it that contains the unit
    path: tuple[str, ...]  # of attributes, to that graph
    lifted: Mapping[Node, InputSpec]  # the placeholders of that graph that stand for constants of the owner
    unit: Unit  # the nodes to move
    owned: Mapping[Node, str]  # the lifted placeholders to own, in graph order, with their names in it
    user_inputs: list[Node] = field(default_factory=list)  # after `build`, what a call of the partition passes
    graph: Graph = field(default_factory=Graph)
    env: dict[Node, Node] = field(default_factory=dict)
    root: dict[str, Any] = field(default_factory=dict)
    input_specs: list[InputSpec] = field(default_factory=list)
    state_dict: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)

    def build(self, mutations: Sequence[tuple[Node, OutputSpec]], results: Sequence[Node]) -> ExportedProgram:
        """Return the unit's program; `user_inputs` are then the nodes that its caller passes."""
        inside = set(self.unit.nodes)
        external = [*dict.fromkeys(n for node in self.unit.nodes for n in node.all_input_nodes if n not in inside)]
        external = in_order_of_inputs(external)
        self._own(external)
        for node in external:
            if node not in self.env and node.op != "get_attr":
                self._placeholder(node, InputSpec(InputKind.USER_INPUT, _argument(node), None))
                self.user_inputs.append(node)
        for node in self.unit.nodes:
            self.env[node] = copy_node(self.graph, node, self._value)
        output_specs = [OutputSpec(s.kind, _argument(self.env[n]), s.target) for n, s in mutations]
        output_specs += [OutputSpec(OutputKind.USER_OUTPUT, _argument(self.env[n]), None) for n in results]
        self.graph.output([self.env[n] for n in (*(n for n, _ in mutations), *results)])
        return self._program(ExportGraphSignature(input_specs=self.input_specs, output_specs=output_specs))

    def _own(self, external: Sequence[Node]) -> None:
        """Add the placeholders of constants: one per tensor, under whatever names it is read."""
        known: dict[tuple[InputKind, int], Node] = {}
        for kind in LIFTED_ORDER:
            for node in self.owned:
                spec = self.lifted[node]
                if spec.kind is not kind:
                    continue
                tensor = self._tensor(spec)
                key = (kind, id(tensor))
                if key in known:
                    self.env[node] = known[key]
                    continue
                argument = TensorArgument(name=self.owned[node])
                known[key] = self._placeholder(node, InputSpec(kind, argument, spec.target, spec.persistent))
                stored = self.owner.state_dict
                (self.state_dict if spec.target in stored else self.constants)[str(spec.target)] = tensor
        for node in external:
            if node.op == "get_attr":
                self._lift_attribute(node, known)

    def _tensor(self, spec: InputSpec) -> Any:
        target = str(spec.target)
        return self.owner.state_dict[target] if target in self.owner.state_dict else self.owner.constants[target]

    def _lift_attribute(self, node: Node, known: dict[tuple[InputKind, int], Node]) -> None:
        """Lift a tensor that a graph holds as an attribute. Graphs and lowered modules stay attributes: `_value`."""
        value = attribute(self.module, str(node.target))
        if not isinstance(value, torch.Tensor):
            return
        key = (InputKind.CONSTANT_TENSOR, id(value))
        if key not in known:
            target = ".".join((*self.path, str(node.target)))
            spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), target)
            known[key] = self._placeholder(node, spec)
            if known[key].meta.get("val") is None:
                known[key].meta["val"] = _fake(value, self.owner)
            self.constants[target] = value
        self.env[node] = known[key]

    def _placeholder(self, node: Node, spec: InputSpec) -> Node:
        name = str(spec.arg.name)
        placeholder = self.graph.create_node("placeholder", name, name=name)
        # It gets another name if that of a constant's copy is taken; the argument and the signature have to match it.
        placeholder.target = spec.arg.name = placeholder.name
        placeholder.meta = {k: v for k, v in node.meta.items() if k != DELEGATION_TAG}
        self.env[node] = placeholder
        self.input_specs.append(spec)
        return placeholder

    def _value(self, node: Node) -> Node:
        if node not in self.env:
            target = str(node.target)
            value = attribute(self.module, target)
            if isinstance(value, GraphModule):  # it moves as a whole: its nodes move with the call
                value = copy_graph_module(value)
                strip_tags(value)
            self.root[target] = value
            self.env[node] = copy_node(self.graph, node, self._value)
        return self.env[node]

    def _program(self, signature: ExportGraphSignature) -> ExportedProgram:
        return assemble_program(
            graph_module=lazy_graph_module(self.root, self.graph),
            signature=signature,
            state_dict=self.state_dict,
            constants=self.constants,
            range_constraints=dict(self.owner.range_constraints),
            verifiers=self.owner.verifiers,
            kind=DelegatedProgram,
        )


def copy_node(graph: Graph, node: Node, value: Callable[[Node], Node]) -> Node:
    """Copy a node to another graph, without its tag."""
    copied = graph.node_copy(node, value)
    copied.meta.pop(DELEGATION_TAG, None)
    return copied


def _argument(node: Node) -> ArgumentSpec:
    value = node.meta.get("val")
    if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
        return SymIntArgument(name=node.name)
    if isinstance(value, (torch.SymFloat, float)):
        return SymFloatArgument(name=node.name)
    if isinstance(value, (torch.SymBool, bool)):
        return SymBoolArgument(name=node.name)
    return TensorArgument(name=node.name)


def _fake(tensor: torch.Tensor, program: ExportedProgram) -> torch.Tensor:
    mode = fake_mode_of(program.graph_module)
    return tensor if mode is None else mode.from_tensor(tensor, static_shapes=True)
