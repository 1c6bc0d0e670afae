"""Why a program cannot be converted or emitted: which operators of the model, at which lines, and what helps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.edge import lacks_out_variant
from exir_lowering._upstream.operators import is_view, written_arguments
from exir_lowering.errors import InputError, exception_text, few
from exir_lowering.graphs.walking import writes

Found = tuple[tuple[str, ...], Node]  # a node, and the path of the graph that holds it

_LISTED = 20  # how many operators a message lists before it only counts the rest
_NAMES = 3  # how many nodes of one operator a message names


def explain_conversion(name: str, program: ExportedProgram, error: Exception) -> InputError:
    """Return why a method was not converted; constants that it writes are not state if their content is not known."""
    lifted = graphs.lifted_inputs(program)
    written = {
        str(lifted[base].target): nodes
        for base, nodes in list_written(program).items()
        if nodes and lifted[base].kind is InputKind.CONSTANT_TENSOR
    }
    if not written:
        return InputError(f"Method {name!r} could not be converted to Edge dialect: {exception_text(error)}")
    return _explain_written(
        f"Method {name!r} writes into tensors that are constants of the exported program, not buffers:",
        written,
        "What to do: make the tensor a buffer of its module, self.register_buffer(name, tensor), and write into that, "
        "not into its `data`.",
    )


def list_places(operators: Mapping[str, Sequence[Found]]) -> list[str]:
    """List operators with their nodes and source lines."""
    lines = []
    for name, nodes in list(operators.items())[:_LISTED]:
        lines += [f"    {name}", *_where(nodes)]
    if len(operators) > _LISTED:
        lines.append(f"    and {len(operators) - _LISTED} more operators")
    return lines


def _where(nodes: Sequence[Found]) -> list[str]:
    """List where in the model nodes come from, one line per source line."""
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
    names, found = graphs.written_state(program), dict[Node, list[Node]]()
    lifted = graphs.lifted_inputs(program)
    for node in program.graph.nodes:
        operands = [graphs.argument(node, name) for name in written_arguments(node.target)]
        if any(writes(nested.module) for nested in graphs.nested_graphs(program.graph_module, node)):
            operands = node.all_input_nodes
        for operand in operands:
            base = base_of(operand)
            if base in lifted:
                found.setdefault(base, []).append(node)
    return found | {node: [] for node, spec in lifted.items() if spec.target in names and node not in found}


def _explain_written(head: str, written: Mapping[str, Sequence[Node]], advice: str) -> InputError:
    lines = [head]
    for target, nodes in written.items():
        lines += [f"    {target}", *_where([((), node) for node in nodes])]
    return InputError("\n".join([*lines, advice]))


def explain_touched(name: str, written: Mapping[str, Sequence[Node]]) -> InputError:
    """Return why the tensors behind inputs cannot be state, given what writes them."""
    return _explain_written(
        f"Method {name!r} writes into tensors that torch.export has changed while it ran the model:",
        written,
        "It does so with a tensor that is reached through an object that is not a module, as in transformers' "
        "StaticCache, and written without an input of the method. What to do: export with "
        "torch.export.export(model, inputs, strict=True), from a new model; or make the tensor a buffer of its module, "
        "self.register_buffer(name, tensor), and write into that.",
    )


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


def base_of(node: Any) -> Any:
    """Return what a view is a view of."""
    while isinstance(node, Node) and node.op == "call_function" and is_view(node.target) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


class OutVariants:
    """ExecuTorch's pass that gives operators their out variants; it records those that have none."""

    def __init__(self, inner: Callable[[GraphModule], Any]) -> None:
        self._inner = inner
        # the method that the pass processed last, by number, and what has no out variant in it
        self.method, self.missing = -1, dict[str, list[Found]]()

    def __call__(self, graph_module: GraphModule) -> Any:
        """Run ExecuTorch's pass."""
        self.method += 1
        try:
            return self._inner(graph_module)
        except MemoryError:
            raise
        except Exception:
            for path, node in graphs.every_node(graph_module):
                if lacks_out_variant(node):
                    self.missing.setdefault(graphs.operator_name(node), []).append((path, node))
            raise


def explain_emission(programs: Mapping[str, ExportedProgram], error: Exception, variants: OutVariants) -> InputError:
    """Return why lowered programs were not emitted; the pass has recorded what has no out variant."""
    if not variants.missing:
        return InputError(f"Methods {', '.join(map(repr, programs))} could not be emitted: {exception_text(error)}")
    lines = [
        f"Method {list(programs)[variants.method]!r} cannot be emitted: these operators stay on the host and have no "
        "out variant, one that writes into given memory; a file cannot contain others.",
        *list_places(variants.missing),
        f"What to do: let a partitioner take {', '.join(sorted(variants.missing))} (`plan` says why one did not), or "
        "rewrite these lines of the model with other operators. A custom operator needs an overload that takes `out` "
        "by keyword, and a kernel for it in the runtime.",
    ]
    return InputError("\n".join(lines))
