"""The program of one partition: its placeholders in order, the constants that it owns, its nodes, its signature.

A lifted input that is tagged moves into every partition that reads it, without a copy. State exists once: it moves only
when one partition reads it, writes it and still has a result to return; otherwise the host writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
from exir_lowering.graphs.quotient import Piece

Owned = dict[Piece, dict[Node, str]]
"""For each piece, the lifted placeholders that it owns, in graph order, with their names in it."""

Mutations = dict[Piece, dict[Node, OutputSpec]]
"""For each piece, the values that it writes to buffers it owns, with the owner's output specs."""


def find_owners(
    program: ExportedProgram,
    piece_of: Mapping[Node, Piece],
    lifted: Mapping[Node, InputSpec],
    shared: Collection[str],
    *,
    nested: bool,
) -> tuple[Owned, Mutations]:
    """Decide what partitions own of what they read: all in nested graphs, else what is tagged and not `shared`."""
    mutated = graphs.written_state(program)
    readers: dict[Node, dict[Piece | None, str]] = {}
    state: dict[str, Piece] = {}  # the piece of each buffer that is written, and that it alone reads
    for node, spec in lifted.items():
        if not nested:
            if DELEGATION_TAG not in node.meta or spec.target in shared:
                continue
            _check_no_copy(node)
        readers[node] = _names_in_pieces(node, piece_of)
        (piece, *others) = readers[node] or (None,)
        if spec.target in mutated and piece is not None and not others and spec.kind is InputKind.BUFFER:
            state[str(spec.target)] = piece
    mutations = _owned_mutations(program, piece_of, state) if state else {}
    taken = {spec.target for written in mutations.values() for spec in written.values()}
    owned: Owned = {}
    for node, names in readers.items():
        target = lifted[node].target
        if target not in mutated or target in taken:
            for reader, name in names.items():
                if reader is not None:
                    owned.setdefault(reader, {})[node] = name
    return owned, mutations


def _names_in_pieces(constant: Node, piece_of: Mapping[Node, Piece]) -> dict[Piece | None, str]:
    """Return the pieces that read a constant (None: the host), each with the name of ExecuTorch's first copy of it."""
    first: dict[Piece | None, int] = {}
    for i, user in enumerate(constant.users):
        first.setdefault(piece_of.get(user), i)
    if len(first) == 1:
        return dict.fromkeys(first, constant.name)
    return {piece: f"{constant.name}_copy_{i - 1}" if i else constant.name for piece, i in first.items()}


def _owned_mutations(program: ExportedProgram, piece_of: Mapping[Node, Piece], state: Mapping[str, Piece]) -> Mutations:
    """Return the mutations that pieces take over, among those whose buffer only one piece reads."""
    taken: Mutations = {}
    returned: set[Piece | None] = set()
    values = program.graph.output_node().args[0]
    for value, spec in zip(values, program.graph_signature.output_specs, strict=True):
        piece = piece_of.get(value) if isinstance(value, Node) else None
        mutates = spec.kind is OutputKind.BUFFER_MUTATION and spec.target in state
        # A signature names a mutation by its value, so one value can be written to one owned buffer.
        if mutates and piece == state[spec.target] and value not in taken.setdefault(piece, {}):
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
    return {piece: written for piece, written in taken.items() if written and piece in (read | returned)}


def _check_no_copy(node: Node) -> None:
    tag = node.meta[DELEGATION_TAG]
    for user in node.users if node.meta.get("no_copy", False) else ():
        user_tag = user.meta.get(DELEGATION_TAG)
        if user_tag != tag:
            raise PartitionerContractError(
                f"Constant {node.name} is marked no_copy and tagged {tag!r}, but {user.name} also reads it, which is "
                f"tagged {user_tag!r}. Expected every reader of a no_copy constant in one partition: tag the reader "
                f"the same, or remove no_copy to let both own it (no memory is copied for that).",
                violation="no_copy",
                details={"node": node.name, "tag": tag, "user": user.name, "user_tag": user_tag},
            )


def build_partition(
    owner: ExportedProgram,
    module: GraphModule,  # the graph of it that has the nodes
    path: tuple[str, ...],  # of that graph
    nodes: Sequence[Node],
    owned: Sequence[tuple[Node, InputSpec, str]],  # lifted placeholders, with their names in it
    mutations: Mapping[Node, OutputSpec],
    results: Sequence[Node],
) -> tuple[ExportedProgram, list[Node]]:
    """Return the program of some nodes with what it owns, writes and returns, and the nodes that its caller passes."""
    graph, env, root = Graph(), dict[Node, Node](), dict[str, Any]()
    specs, state_dict, constants = list[InputSpec](), dict[str, Any](), dict[str, Any]()
    known: dict[tuple[InputKind, int], Node] = {}  # one placeholder per tensor, under whatever names it is read

    def add(node: Node, spec: InputSpec) -> Node:
        name = str(spec.arg.name)
        placeholder = graph.create_node("placeholder", name, name=name)
        # It gets another name if that of a constant's copy is taken; the argument and the signature have to match it.
        placeholder.target = spec.arg.name = placeholder.name
        placeholder.meta = {k: v for k, v in node.meta.items() if k != DELEGATION_TAG}
        specs.append(spec)
        return placeholder

    def value_of(node: Node) -> Node:
        if node not in env:
            value = attribute(module, str(node.target))
            if isinstance(value, GraphModule):  # it moves as a whole: its nodes move with the call
                value = copy_graph_module(value)
                strip_tags(value)
            root[str(node.target)] = value
            env[node] = copy_node(graph, node, value_of)
        return env[node]

    for node, spec, name in sorted(owned, key=lambda one: LIFTED_ORDER.index(one[1].kind)):
        tensor = graphs.lifted_value(owner, spec.target)
        key = (spec.kind, id(tensor))
        if key not in known:
            known[key] = add(node, InputSpec(spec.kind, TensorArgument(name), spec.target, spec.persistent))
            (state_dict if spec.target in owner.state_dict else constants)[str(spec.target)] = tensor
        env[node] = known[key]
    inside = set(nodes)
    read = dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes)
    external = in_order_of_inputs([node for node in read if node not in inside])
    for node in external:
        tensor = attribute(module, str(node.target)) if node.op == "get_attr" else None
        if isinstance(tensor, torch.Tensor):  # graphs and lowered modules stay attributes
            key = (InputKind.CONSTANT_TENSOR, id(tensor))
            if key not in known:
                target = ".".join((*path, str(node.target)))
                made = known[key] = add(node, InputSpec(key[0], TensorArgument(node.name), target))
                if made.meta.get("val") is None:
                    mode = fake_mode_of(owner.graph_module)
                    made.meta["val"] = tensor if mode is None else mode.from_tensor(tensor, static_shapes=True)
                constants[target] = tensor
            env[node] = known[key]
    passed = [node for node in external if node not in env and node.op != "get_attr"]
    for node in passed:
        env[node] = add(node, InputSpec(InputKind.USER_INPUT, argument_of(node), None))
    for node in nodes:
        env[node] = copy_node(graph, node, value_of)
    output_specs = [OutputSpec(s.kind, argument_of(env[n]), s.target) for n, s in mutations.items()]
    output_specs += [OutputSpec(OutputKind.USER_OUTPUT, argument_of(env[n]), None) for n in results]
    graph.output([env[n] for n in (*mutations, *results)])
    program = assemble_program(
        graph_module=lazy_graph_module(root, graph),
        signature=ExportGraphSignature(input_specs=specs, output_specs=output_specs),
        state_dict=state_dict,
        constants=constants,
        range_constraints=dict(owner.range_constraints),
        verifiers=owner.verifiers,
        kind=DelegatedProgram,
    )
    return program, passed


def copy_node(graph: Graph, node: Node, value: Callable[[Node], Node]) -> Node:
    """Copy a node to another graph, without its tag."""
    copied = graph.node_copy(node, value)
    copied.meta.pop(DELEGATION_TAG, None)
    return copied


def argument_of(node: Node) -> ArgumentSpec:
    """Return how a signature names a node's value."""
    value = node.meta.get("val")
    if isinstance(value, (torch.SymBool, bool)):  # before int, which bool is
        return SymBoolArgument(node.name)
    if isinstance(value, (torch.SymInt, int)):
        return SymIntArgument(node.name)
    return SymFloatArgument(node.name) if isinstance(value, (torch.SymFloat, float)) else TensorArgument(node.name)
