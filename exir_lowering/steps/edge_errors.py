"""Where in the model the operators are that cannot be lowered, or write what cannot be state; and what helps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.operators import is_view, written_arguments
from exir_lowering.errors import InputError, few
from exir_lowering.graphs.walking import writes

Found = tuple[tuple[str, ...], Node]  # the path of a graph, and a node in it

_LISTED = 20  # how many operators a message lists before it only counts the rest
_NAMES = 3  # how many nodes of one operator, and lines of the model, a message names


def list_places(operators: Mapping[str, Sequence[Found]]) -> list[str]:
    """List operators with their nodes and source lines."""
    lines = []
    for name, nodes in list(operators.items())[:_LISTED]:
        lines += [f"    {name}", *_where(nodes)]
    if len(operators) > _LISTED:
        lines.append(f"    and {len(operators) - _LISTED} more operators")
    return lines


def _where(nodes: Sequence[Found]) -> list[str]:
    places: dict[tuple[str, str], list[str]] = {}
    for path, node in nodes:
        place = (graphs.module_stack(node), graphs.source_line(node) or "source line not known")
        places.setdefault(place, []).append(graphs.qualified_name(path, node))
    lines = []
    for (module, line), names in list(places.items())[:_NAMES]:
        inside = f" in module {module!r}" if module else ""
        lines.append(f"        {few(names, _NAMES)}{inside}: {line}")
    if len(places) > _NAMES:
        lines.append(f"        and at {len(places) - _NAMES} more lines of the model")
    return lines


def list_written(program: ExportedProgram) -> dict[Node, list[Node]]:
    """Return the lifted inputs that a program writes, with what writes them."""
    names, lifted, found = graphs.written_state(program), graphs.lifted_inputs(program), dict[Node, list[Node]]()
    for node in program.graph.nodes:
        operands = [graphs.argument(node, name) for name in written_arguments(node.target)]
        if any(writes(nested.module) for nested in graphs.nested_graphs(program.graph_module, node)):
            operands = node.all_input_nodes
        for base in operands:
            while isinstance(base, Node) and base.all_input_nodes and is_view(base.target):
                base = base.all_input_nodes[0]
            if base in lifted:
                found.setdefault(base, []).append(node)
    return found | {node: [] for node, spec in lifted.items() if spec.target in names and node not in found}


def explain_touched(name: str, written: Mapping[str, Sequence[Node]]) -> InputError:
    """Return why the tensors behind inputs cannot be state, given what writes them."""
    lines = [f"Method {name!r} writes into tensors that torch.export has changed while it ran the model:"]
    lines += list_places({target: [((), node) for node in nodes] for target, nodes in written.items()})
    lines.append(
        "It does so with a tensor that is reached through an object that is not a module, as in transformers' "
        "StaticCache, and written without an input of the method. What to do: export with "
        "torch.export.export(model, inputs, strict=True), from a new model; or make the tensor a buffer of its module, "
        "self.register_buffer(name, tensor), and write into that."
    )
    return InputError("\n".join(lines))


def explain_overlap(name: str, targets: Sequence[str], writers: Sequence[Node]) -> InputError:
    """Return why two tensors of one memory cannot be state."""
    one, other = targets
    lines = [
        f"Method {name!r} has {one!r} and {other!r}, which overlap in memory, and what they cover is written:",
        *(_where([((), node) for node in writers]) or ["        by another method"]),
        "What to do: register the whole tensor as a buffer of one dtype, self.register_buffer(name, tensor), and take "
        "the parts of it in `forward`.",
    ]
    return InputError("\n".join(lines))
