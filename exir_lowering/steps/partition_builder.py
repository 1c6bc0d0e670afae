"""The program of one partition: its placeholders in order, the constants that it owns, its nodes, its signature.

A lifted input (parameter, buffer, lifted constant) that a partitioner tagged moves into every partition that reads it,
without a copy, and stays on the host only when the host reads it too. State is different: it exists once. A
mutated buffer moves only when one partition reads it, writes it and still has a result to return; otherwise the
mutation stays an output of the host program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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

from exir_lowering import graphs
from exir_lowering._upstream.programs import (
    DelegatedProgram,
    assemble_program,
    fake_mode_of,
    in_order_of_inputs,
    lazy_graph_module,
)
from exir_lowering.errors import PartitionerContractError
from exir_lowering.graphs import DELEGATION_TAG, LIFTED_ORDER, attribute, copy_graph_module, strip_tags
from exir_lowering.graphs.quotient import Piece, Unit


@dataclass(frozen=True, slots=True)
class Ownership:
    """What the partitions of one graph own."""

    # for each piece, the lifted placeholders that it owns, in graph order, with their names in it
    inputs: Mapping[Piece, Mapping[Node, str]]
    # for each piece, the values that it writes to buffers it owns, with the owner's output specs
    mutations: Mapping[Piece, tuple[tuple[Node, OutputSpec], ...]]

    @property
    def taken(self) -> frozenset[int]:
        """The owner's output specs of those mutations, by id."""
        return frozenset(id(spec) for written in self.mutations.values() for _, spec in written)


def top_ownership(
    program: ExportedProgram,
    piece_of: Mapping[Node, Piece],
    lifted: Mapping[Node, InputSpec],
    shared: Collection[str] = (),
) -> Ownership:
    """Decide for the top graph, where partitioners tag constants; nobody owns what is `shared` with other methods."""
    mutated = graphs.written_state(program)
    inputs: dict[Piece, dict[Node, str]] = {}
    state: dict[str, tuple[Node, Piece]] = {}
    for node, spec in lifted.items():
        if DELEGATION_TAG not in node.meta or spec.target in shared:
            continue
        _check_no_copy(node)
        names = _names_in_pieces(node, piece_of)
        (piece, *others) = names or (None,)
        if spec.target not in mutated:
            _own(inputs, node, names)
        elif piece is not None and not others and spec.kind == InputKind.BUFFER:
            state[str(spec.target)] = (node, piece)
    mutations = _owned_mutations(program, piece_of, state)
    for piece, written in mutations.items():
        for _, output in written:
            node = state[str(output.target)][0]
            _own(inputs, node, {piece: node.name})
    position = {node: i for i, node in enumerate(lifted)}
    ordered = {
        piece: dict(sorted(names.items(), key=lambda item: position[item[0]])) for piece, names in inputs.items()
    }
    return Ownership(ordered, mutations)


def nested_ownership(piece_of: Mapping[Node, Piece], lifted: Mapping[Node, InputSpec]) -> Ownership:
    """Decide for a graph that an operator calls: a partition owns each constant it reads, as these cannot be tagged."""
    inputs: dict[Piece, dict[Node, str]] = {}
    for node in lifted:
        _own(inputs, node, _names_in_pieces(node, piece_of))
    return Ownership(inputs, {})


def _own(
    inputs: dict[Piece, dict[Node, str]], node: Node, names: Mapping[Piece, str] | Mapping[Piece | None, str]
) -> None:
    for piece, name in names.items():
        if piece is not None:
            inputs.setdefault(piece, {})[node] = name


def _names_in_pieces(constant: Node, piece_of: Mapping[Node, Piece]) -> dict[Piece | None, str]:
    """Return the pieces that read a constant (None: the host), each with the constant's name in it.

    ExecuTorch copies a constant that is read outside of its tag once per reader, and numbers the copies. Here, a piece
    has one placeholder, with the name of the first copy that the piece would get, since payloads may contain it.
    """
    first: dict[Piece | None, int] = {}
    for i, user in enumerate(constant.users):
        first.setdefault(piece_of.get(user), i)
    if len(first) == 1:
        return dict.fromkeys(first, constant.name)
    return {piece: f"{constant.name}_copy_{i - 1}" if i else constant.name for piece, i in first.items()}


def _owned_mutations(
    program: ExportedProgram, piece_of: Mapping[Node, Piece], state: Mapping[str, tuple[Node, Piece]]
) -> dict[Piece, tuple[tuple[Node, OutputSpec], ...]]:
    """Return the mutations that pieces take over, among those whose buffer only one piece reads."""
    taken: dict[Piece, dict[Node, OutputSpec]] = {}
    returned: set[Piece | None] = set()
    values = program.graph.output_node().args[0]
    for value, spec in zip(values, program.graph_signature.output_specs, strict=True):
        piece = piece_of.get(value) if isinstance(value, Node) else None
        mutates = spec.kind is OutputKind.BUFFER_MUTATION and spec.target in state
        # A signature names a mutation by its value, so one value can be written to one owned buffer.
        if mutates and piece == state[spec.target][1] and value not in taken.setdefault(piece, {}):
            taken[piece][value] = spec
        else:
            returned.add(piece)
    # A call without any other result would be removed as dead code, and its state with it.
    read = {
        piece
        for node, piece in piece_of.items()
        for user in node.users
        if user.op != "output" and piece_of.get(user) != piece
    }
    return {piece: tuple(w.items()) for piece, w in taken.items() if w and piece in (read | returned)}


def _check_no_copy(node: Node) -> None:
    tag = node.meta[DELEGATION_TAG]
    if not node.meta.get("no_copy", False):
        return
    for user in node.users:
        user_tag = user.meta.get(DELEGATION_TAG)
        if user_tag != tag:
            raise PartitionerContractError(
                f"Constant {node.name} is marked no_copy and tagged {tag!r}, but {user.name} also reads it, which is "
                f"tagged {user_tag!r}. Expected every reader of a no_copy constant in one partition: tag the reader "
                f"the same, or remove no_copy to let both own it (no memory is copied for that).",
                violation="no_copy",
                details={"node": node.name, "tag": tag, "user": user.name, "user_tag": user_tag},
            )


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
                self._placeholder(node, InputSpec(InputKind.USER_INPUT, argument_of(node), None))
                self.user_inputs.append(node)
        for node in self.unit.nodes:
            self.env[node] = copy_node(self.graph, node, self._value)
        output_specs = [OutputSpec(s.kind, argument_of(self.env[n]), s.target) for n, s in mutations]
        output_specs += [OutputSpec(OutputKind.USER_OUTPUT, argument_of(self.env[n]), None) for n in results]
        self.graph.output([self.env[n] for n in (*(n for n, _ in mutations), *results)])
        return assemble_program(
            graph_module=lazy_graph_module(self.root, self.graph),
            signature=ExportGraphSignature(input_specs=self.input_specs, output_specs=output_specs),
            state_dict=self.state_dict,
            constants=self.constants,
            range_constraints=dict(self.owner.range_constraints),
            verifiers=self.owner.verifiers,
            kind=DelegatedProgram,
        )

    def _own(self, external: Sequence[Node]) -> None:
        """Add the placeholders of constants: one per tensor, under whatever names it is read."""
        known: dict[tuple[InputKind, int], Node] = {}
        for kind in LIFTED_ORDER:
            for node in self.owned:
                spec = self.lifted[node]
                if spec.kind is not kind:
                    continue
                tensor = graphs.lifted_value(self.owner, spec.target)
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
                mode = fake_mode_of(self.owner.graph_module)
                known[key].meta["val"] = value if mode is None else mode.from_tensor(value, static_shapes=True)
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


def copy_node(graph: Graph, node: Node, value: Callable[[Node], Node]) -> Node:
    """Copy a node to another graph, without its tag."""
    copied = graph.node_copy(node, value)
    copied.meta.pop(DELEGATION_TAG, None)
    return copied


def argument_of(node: Node) -> ArgumentSpec:
    """Return how a signature names a node's value."""
    value = node.meta.get("val")
    if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
        return SymIntArgument(name=node.name)
    if isinstance(value, (torch.SymFloat, float)):
        return SymFloatArgument(name=node.name)
    if isinstance(value, (torch.SymBool, bool)):
        return SymBoolArgument(name=node.name)
    return TensorArgument(name=node.name)
