"""Operators that draw random numbers: PyTorch runs them, in the order of the graph, so that a seed gives the same."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.operators import wrapped_operator
from exir_lowering.graphs.order import topological

Order = Mapping[tuple[str, ...], Sequence[str]]
"""The nodes that draw random numbers, by the path of their graph, in the order in which they run."""


def is_random(node: Node) -> bool:
    """Return whether a node draws random numbers, itself or in a graph that it calls."""
    if node.op != "call_function":
        return False
    if torch.Tag.nondeterministic_seeded in getattr(wrapped_operator(node.target), "tags", ()):
        return True
    owner = node.graph.owning_module
    return owner is not None and any(list_random(nested.module) for nested in graphs.nested_graphs(owner, node))


def list_random(module: GraphModule) -> list[str]:
    """Return the operators that draw random numbers, in the order in which they stand."""
    return [graphs.operator_name(node) for _, node in graphs.every_node(module) if is_random(node)]


def order_of(module: GraphModule) -> dict[tuple[str, ...], list[str]]:
    """Return in which order the random numbers of a graph, and of the graphs nested in it, are drawn."""
    return {path: _random_names(inner) for path, inner in graphs.walk(module)}


def restore_order(module: GraphModule, order: Order) -> bool:
    """Move nodes of a lowered graph so that random numbers are drawn in an order; return whether that can be done."""
    return all(_restore(inner, order.get(path, ())) for path, inner in graphs.walk(module))


def _restore(module: GraphModule, names: Sequence[str]) -> bool:
    if _random_names(module) == list(names):
        return True
    nodes = list(module.graph.nodes)
    numbers = {node: number for number, node in enumerate(nodes)}
    by_name = {node.name: number for node, number in numbers.items()}
    if not all(name in by_name for name in names):
        return False
    successors = [[numbers[user] for user in node.users] for node in nodes]
    for before, after in itertools.pairwise(names):
        successors[by_name[before]].append(by_name[after])
    chosen = topological(successors)
    if len(chosen) != len(nodes):
        return False
    last = module.graph.output_node()
    for number in chosen:
        if nodes[number] is not last:
            last.prepend(nodes[number])
    module.recompile()
    return True


def _random_names(module: GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes if is_random(node)]
