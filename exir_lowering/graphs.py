"""What several steps need to know of FX graphs: nested graphs, copies that share their tensors, source lines."""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.export import ExportedProgram, ExportGraphSignature
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import Graph, GraphModule, Node

from exir_lowering import _upstream, sources
from exir_lowering.sources import Frame

DELEGATION_TAG = "delegation_tag"
"""The one key of node.meta that the line uses: ExecuTorch's contract with partitioners."""

OUT_OF_SIGHT = "exir_lowering.out_of_sight.default"
"""The operator that stands for one that a partitioner must not take, while it runs inside of another partitioner."""

LIFTED_ORDER = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
"""The kinds of lifted inputs, in the order of a partition's placeholders."""

_HOPS = torch.ops.higher_order


@dataclass(frozen=True, slots=True)
class NestedGraph:
    """A graph module that a higher-order operator calls.

    Attributes:
        name: The attribute that holds it.
        module: The graph module.
        call: The node that calls it.
        bound: For each placeholder, the node of the calling graph that it stands for unchanged, or None
            (a slice, a carried value).
    """

    name: str
    module: GraphModule
    call: Node
    bound: tuple[Node | None, ...]


def is_getitem(node: Node) -> bool:
    """Tell whether a node picks one of several results."""
    return node.op == "call_function" and node.target is operator.getitem


def is_delegate_call(node: Node) -> bool:
    """Tell whether a node calls a delegate."""
    return node.op == "call_function" and node.target is _upstream.CALL_DELEGATE


def is_operator(node: Node) -> bool:
    """Tell whether a node is an operator: what partitions are made of, what a plan counts.

    Calls of a delegate are none, and getitem is a part of the operator whose result it picks.
    """
    return node.op == "call_function" and not is_getitem(node) and not is_delegate_call(node)


def qualified_name(path: tuple[str, ...], node: Node) -> str:
    """Return a node's name, with the path of the nested graph that holds it."""
    return ".".join((*path, node.name))


def attribute(module: torch.nn.Module, target: str) -> Any:
    """Return what a get_attr node names."""
    value: Any = module
    for atom in target.split("."):
        value = getattr(value, atom)
    return value


@dataclass(frozen=True, slots=True)
class OperandLayout:
    """Where a higher-order operator keeps its graphs, and the operands that reach them unchanged.

    Attributes:
        graphs: Positions of the graphs among the arguments.
        before: Positions of the operand lists that come first among the placeholders and change on the way
            (slices of map and scan, carried values).
        unchanged: The position of the operand list that every graph gets as it is.
    """

    graphs: tuple[int, ...]
    before: tuple[int, ...]
    unchanged: int


OPERAND_LAYOUTS: Mapping[Any, OperandLayout] = {
    _HOPS.cond: OperandLayout(graphs=(1, 2), before=(), unchanged=3),
    _HOPS.map_impl: OperandLayout(graphs=(0,), before=(1,), unchanged=2),
    _HOPS.scan: OperandLayout(graphs=(0,), before=(1, 2), unchanged=3),
    _HOPS.while_loop: OperandLayout(graphs=(0, 1), before=(2,), unchanged=3),
}


def nested_graphs(graph_module: GraphModule, node: Node) -> Iterator[NestedGraph]:
    """Yield the graphs that a node calls: those of cond, map, scan and while_loop, and of operators not known here."""
    if node.op != "call_function" or is_delegate_call(node):
        return
    for argument in dict.fromkeys(node.all_input_nodes):
        if argument.op != "get_attr":
            continue
        module = attribute(graph_module, str(argument.target))
        if isinstance(module, GraphModule):
            yield NestedGraph(str(argument.target), module, node, _bound_operands(node, module))


def _bound_operands(node: Node, module: GraphModule) -> tuple[Node | None, ...]:
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    layout = OPERAND_LAYOUTS.get(node.target)
    if layout is None or len(node.args) <= layout.unchanged:
        return (None,) * len(placeholders)
    bound: list[Node | None] = []
    for position in layout.before:
        changed = node.args[position]
        bound += [None] * len(changed if isinstance(changed, (list, tuple)) else [changed])
    unchanged = node.args[layout.unchanged]
    if not isinstance(unchanged, (list, tuple)):
        return (None,) * len(placeholders)
    bound += [arg if isinstance(arg, Node) else None for arg in unchanged]
    return tuple(bound) if len(bound) == len(placeholders) else (None,) * len(placeholders)


def walk(graph_module: GraphModule, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], GraphModule]]:
    """Yield a graph module and every graph nested in it, each once, with its attribute path."""
    yield path, graph_module
    seen: set[str] = set()
    for node in graph_module.graph.nodes:
        for nested in nested_graphs(graph_module, node):
            if nested.name not in seen:
                seen.add(nested.name)
                yield from walk(nested.module, (*path, nested.name))


def delegates(
    graph_module: GraphModule, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], GraphModule, str]]:
    """Yield each delegate call in the order in which a file numbers them: its graph's path, graph, and attribute."""
    for node in graph_module.graph.nodes:
        if is_delegate_call(node):
            yield path, graph_module, str(node.args[0].target)
        for nested in nested_graphs(graph_module, node):
            yield from delegates(nested.module, (*path, nested.name))


def staying_nodes(graph_module: GraphModule, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node]]:
    """Yield every node with the path of its graph; a tagged call moves with its graphs, whose nodes are left out."""
    seen: set[str] = set()
    for node in graph_module.graph.nodes:
        yield path, node
        if DELEGATION_TAG in node.meta:
            continue
        for nested in nested_graphs(graph_module, node):
            if nested.name not in seen:
                seen.add(nested.name)
                yield from staying_nodes(nested.module, (*path, nested.name))


def copy_graph_module(graph_module: GraphModule) -> GraphModule:
    """Copy a graph and the graphs nested in it. Tensors, lowered modules and metadata values are shared."""
    graph = Graph()
    root: dict[str, Any] = {}
    env: dict[Node, Node] = {}
    for node in graph_module.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        if node.op == "get_attr" and node.target not in root:
            value = attribute(graph_module, node.target)
            root[node.target] = copy_graph_module(value) if isinstance(value, GraphModule) else value
    copied = _upstream.lazy_graph_module(root, graph)
    copied.meta.update(graph_module.meta)
    return copied


def copy_program(
    program: ExportedProgram, graph_module: GraphModule | None = None, *, kind: type[ExportedProgram] = ExportedProgram
) -> ExportedProgram:
    """Copy a program's graph (or take another one), signature and tables; the tensors are shared."""
    return _upstream.assemble_program(
        graph_module=graph_module or copy_graph_module(program.graph_module),
        signature=copy_signature(program),
        state_dict=dict(program.state_dict),
        constants=dict(program.constants),
        range_constraints=dict(program.range_constraints),
        module_call_graph=list(program.module_call_graph),
        example_inputs=program.example_inputs,
        verifiers=program.verifiers,
        guards_code=_upstream.guards_code_of(program),
        kind=kind,
    )


def copy_signature(program: ExportedProgram) -> ExportGraphSignature:
    """Copy a program's signature with the names in it: torch renames them in place when a node is replaced."""
    signature = program.graph_signature
    inputs = [replace(spec, arg=copy.copy(spec.arg)) for spec in signature.input_specs]
    outputs = [replace(spec, arg=copy.copy(spec.arg)) for spec in signature.output_specs]
    return ExportGraphSignature(input_specs=inputs, output_specs=outputs)


def strip_tags(graph_module: GraphModule) -> None:
    """Remove the tags of a graph and of the graphs nested in it."""
    for _, module in walk(graph_module):
        for node in module.graph.nodes:
            node.meta.pop(DELEGATION_TAG, None)


def operator_name(node: Node) -> str:
    """Return a node's operator as people write it, such as `aten.add.Tensor`."""
    return target_name(node.target)


_RETRACING = frozenset({"ExportedProgram.module()", "Interpreter_PropagateUnbackedSymInts"})
"""What torch.export calls the passes in which it decomposes; other passes make nodes for other reasons."""


def origins(node: Node) -> list[str]:
    """Return the operators that a node was decomposed from, such as `aten.linear.default` for an addmm."""
    found: dict[str, None] = {}
    sources = list(node.meta.get("from_node") or ())
    while sources:
        source = sources.pop()
        if source.pass_name in _RETRACING:
            found[str(source.target)] = None
            sources += source.from_node
    return list(found)


def target_name(operator: Any) -> str:
    """Return an operator's name as people write it, such as `aten.add.Tensor`."""
    return _upstream.operator_name(operator)


@lru_cache(maxsize=1)
def known_operators() -> frozenset[str]:
    """Return the names of all operators that torch knew when this was first called."""
    return _upstream.known_operators()


def is_mutating(node: Node) -> bool:
    """Tell whether a node's operator writes into its arguments, as far as its schema says."""
    return _upstream.mutates_arguments(node.target)


def argument(node: Node, name: str) -> Any:
    """Return what a node passes for an argument of its operator, by name; None when it passes nothing.

    Args:
        node: The node.
        name: The argument's name in the operator's schema.
    """
    if name in node.kwargs:
        return node.kwargs[name]
    names = _upstream.argument_names(node.target)
    if name in names and names.index(name) < len(node.args):
        return node.args[names.index(name)]
    return None


def lifted_inputs(program: ExportedProgram) -> dict[Node, InputSpec]:
    """Return the placeholders that hold parameters, buffers and lifted constants, with their specs."""
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    specs = program.graph_signature.input_specs
    return {node: spec for node, spec in zip(placeholders, specs, strict=True) if spec.kind in LIFTED_ORDER}


_GENERATED = re.compile(r'File "<[^"]+", line \d+, in \S+\s+(\w+) = ')


def stack(node: Node) -> tuple[Frame, ...]:
    """Return the lines of the model that a node came from, the outermost first."""
    return sources.frames(node.meta.get("stack_trace") or "")


def source_line(node: Node) -> str:
    """Return the innermost line of the model that a node came from, "" when it is not known.

    Lines of torch itself are passed over, as long as there are others, and those of generated code always.
    """
    frames = stack(node)
    number = sources.innermost(frames)
    return "" if number is None else str(frames[number])


def source_code(node: Node) -> str:
    """Return a node's source line as a message ends with it, or which node it is when the line is not known."""
    line = source_line(node)
    return sources.told([line]) if line else f"Node {node.name}; its source line is not known."


def generated_name(node: Node) -> str:
    """Return the name in generated code that a node came from when nothing else is known of its source, or ""."""
    found = list(_GENERATED.finditer(node.meta.get("stack_trace") or ""))
    return found[-1][1] if found and not stack(node) else ""


def module_stack(node: Node) -> str:
    """Return the path of the module that a node came from, "" when it is not known."""
    stack = modules(node)
    return stack[-1][0] if stack else ""


def modules(node: Node) -> list[tuple[str, str]]:
    """Return the modules that a node came from, the outermost first, each with its path and its class's full name."""
    stack = node.meta.get("nn_module_stack") or {}
    found = []
    for entry in stack.values():
        if isinstance(entry, tuple) and len(entry) == 2:
            path, kind = entry
            found.append((str(path), f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)))
    return found
