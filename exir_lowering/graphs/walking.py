"""FX graphs and the graphs nested in them: kinds of nodes, and iteration over all of them."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from exir_lowering._upstream.operators import mutates_arguments
from exir_lowering._upstream.programs import CALL_DELEGATE

DELEGATION_TAG = "delegation_tag"
"""The one key of node.meta that the line uses: ExecuTorch's contract with partitioners."""

_HOPS = torch.ops.higher_order


@dataclass(frozen=True, slots=True)
class NestedGraph:
    """A graph module that a higher-order operator calls.

    Attributes:
        name: The attribute that holds it.
        module: The graph module.
        call: The node that calls it.
        bound: For each placeholder, the node of the calling graph whose value it receives unchanged, or None (for a
            slice or a carried value).
    """

    name: str
    module: GraphModule
    call: Node
    bound: tuple[Node | None, ...]

    def receivers(self, known: Container[Node | None]) -> dict[Node, Node]:
        """Return the placeholders that receive one of some nodes unchanged, each with that node."""
        pairs = zip(self.module.graph.find_nodes(op="placeholder"), self.bound, strict=True)
        return {inner: outer for inner, outer in pairs if outer is not None and outer in known}


def is_getitem(node: Node) -> bool:
    """Return whether a node picks one of several results."""
    return node.op == "call_function" and node.target is operator.getitem


def is_delegate_call(node: Node) -> bool:
    """Return whether a node calls a delegate."""
    return node.op == "call_function" and node.target is CALL_DELEGATE


def is_operator(node: Node) -> bool:
    """Return whether a node is an operator, as partitions and plans count them: no delegate call, no getitem."""
    return node.op == "call_function" and not is_getitem(node) and not is_delegate_call(node)


def qualified_name(path: tuple[str, ...], node: Node) -> str:
    """Return a node's name, with the path of the nested graph that holds it.

    Args:
        path: The path of the graph, as `walk` yields it.
        node: The node.
    """
    return ".".join((*path, node.name))


def attribute(module: torch.nn.Module, target: str) -> Any:
    """Return the attribute that a get_attr node names.

    Args:
        module: The graph module.
        target: The node's target, with dots.
    """
    return operator.attrgetter(target)(module)


class OperandLayout(NamedTuple):
    """Where a higher-order operator keeps the operands that reach its graphs, by position."""

    before: tuple[int, ...]  # lists of operands that come first and are changed: slices of map and scan, carried values
    unchanged: int  # the list of operands that every graph gets unchanged


OPERAND_LAYOUTS: Mapping[Any, OperandLayout] = {
    _HOPS.cond: OperandLayout(before=(), unchanged=3),
    _HOPS.map_impl: OperandLayout(before=(1,), unchanged=2),
    _HOPS.scan: OperandLayout(before=(1, 2), unchanged=3),
    _HOPS.while_loop: OperandLayout(before=(2,), unchanged=3),
}
"""The layout of each higher-order operator that is known here."""


def calls_graphs(graph_module: GraphModule, node: Node) -> bool:
    """Return whether a node is a higher-order call: one that calls graphs.

    Args:
        graph_module: The graph that the node is in.
        node: The node.
    """
    return any(True for _ in nested_graphs(graph_module, node))


def nested_graphs(graph_module: GraphModule, node: Node) -> Iterator[NestedGraph]:
    """Yield the graphs that a node calls: of cond, map, scan and while_loop, and of operators not known here.

    Args:
        graph_module: The graph that the node is in.
        node: The node.
    """
    if node.op != "call_function" or is_delegate_call(node):
        return
    for argument in dict.fromkeys(node.all_input_nodes):
        if argument.op != "get_attr":
            continue
        module = attribute(graph_module, str(argument.target))
        if isinstance(module, GraphModule):
            yield NestedGraph(str(argument.target), module, node, _bound_operands(node, module))


def _bound_operands(node: Node, module: GraphModule) -> tuple[Node | None, ...]:
    count = len(module.graph.find_nodes(op="placeholder"))
    layout = OPERAND_LAYOUTS.get(node.target)
    unchanged = node.args[layout.unchanged] if layout is not None and len(node.args) > layout.unchanged else None
    bound: list[Node | None] = []
    if layout is not None and isinstance(unchanged, (list, tuple)):
        for position in layout.before:
            changed = node.args[position]
            bound += [None] * (len(changed) if isinstance(changed, (list, tuple)) else 1)
        bound += [arg if isinstance(arg, Node) else None for arg in unchanged]
    return tuple(bound) if len(bound) == count else (None,) * count


def walk(graph_module: GraphModule) -> Iterator[tuple[tuple[str, ...], GraphModule]]:
    """Yield a graph module and every graph nested in it, each once, outermost first, with its attribute path."""
    yield (), graph_module
    seen: set[str] = set()
    for node in graph_module.graph.nodes:
        for nested in nested_graphs(graph_module, node):
            if nested.name not in seen:
                seen.add(nested.name)
                yield from (((nested.name, *path), module) for path, module in walk(nested.module))


def every_node(graph_module: GraphModule) -> Iterator[tuple[tuple[str, ...], Node]]:
    """Yield the nodes of a graph and of every graph nested in it, outermost first, each with the path of its graph."""
    for path, module in walk(graph_module):
        for node in module.graph.nodes:
            yield path, node


def writes(graph_module: GraphModule) -> bool:
    """Return whether a graph, or one that it calls, overwrites anything."""
    return any(mutates_arguments(node.target) for _, node in every_node(graph_module))


def delegates(graph_module: GraphModule) -> Iterator[tuple[tuple[str, ...], GraphModule, str]]:
    """Yield the path, graph and attribute of each delegate call, in the order in which a file numbers them."""
    for node in graph_module.graph.nodes:
        if is_delegate_call(node):
            yield (), graph_module, str(node.args[0].target)
        for nested in nested_graphs(graph_module, node):
            yield from (((nested.name, *path), module, name) for path, module, name in delegates(nested.module))


def staying_nodes(graph_module: GraphModule) -> Iterator[tuple[tuple[str, ...], Node]]:
    """Yield every node with the path of its graph, except nodes of graphs that move with a tagged call."""
    seen: set[str] = set()
    for node in graph_module.graph.nodes:
        yield (), node
        for nested in nested_graphs(graph_module, node) if DELEGATION_TAG not in node.meta else ():
            if nested.name not in seen:
                seen.add(nested.name)
                yield from (((nested.name, *path), inner) for path, inner in staying_nodes(nested.module))


def strip_tags(graph_module: GraphModule) -> None:
    """Remove the tags of a graph and of the graphs nested in it."""
    for _, node in every_node(graph_module):
        node.meta.pop(DELEGATION_TAG, None)
