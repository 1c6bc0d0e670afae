"""Who owns a constant: the host program, or the partitions that read it.

A lifted input (parameter, buffer, lifted constant) that a partitioner tagged moves into every partition that reads it,
without a copy, and stays on the host only when the host reads it too. State is different: it exists once. A
mutated buffer moves only when one partition reads it, writes it and still has a result to return; otherwise the
mutation stays an output of the host program.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.errors import PartitionerContractError
from exir_lowering.graphs import DELEGATION_TAG
from exir_lowering.graphs.quotient import Piece


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


def top_graph(
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


def nested_graph(piece_of: Mapping[Node, Piece], lifted: Mapping[Node, InputSpec]) -> Ownership:
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
