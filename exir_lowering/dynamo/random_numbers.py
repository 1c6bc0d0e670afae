"""Operators that draw random numbers: PyTorch runs them, in the order of the graph, so that a seed gives the same."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.operators import wrapped_operator
from exir_lowering.dynamo import host_calls
from exir_lowering.dynamo.wrapped import LessPartitioner, named_after
from exir_lowering.graphs.order import topological
from exir_lowering.plugins.backend import ExplainedResult

REASON = "it draws random numbers, which PyTorch does in the order of the model, so that a seed gives the same"

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
    return [graphs.operator_name(node) for _, inner in graphs.walk(module) for node in _random_nodes(inner)]


def order_of(module: GraphModule) -> dict[tuple[str, ...], list[str]]:
    """Return in which order the random numbers of a graph, and of the graphs nested in it, are drawn."""
    return {path: [node.name for node in _random_nodes(inner)] for path, inner in graphs.walk(module)}


def restore_order(module: GraphModule, order: Order) -> bool:
    """Move nodes of a lowered graph so that random numbers are drawn in an order; return whether that can be done.

    The graph computes the same.
    """
    return all(_restore(inner, order.get(path, ())) for path, inner in graphs.walk(module))


def _restore(module: GraphModule, names: Sequence[str]) -> bool:
    if [node.name for node in _random_nodes(module)] == list(names):
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


def _random_nodes(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if is_random(node)]


def leaving_random(partitioner: Partitioner, *, apart: bool = False) -> Partitioner:
    """Return a partitioner that does what another one does, but takes no operator that draws random numbers.

    Nor does it take one that stands for a call of a higher-order operator. With `apart`, what needs no random number,
    the first one, the second one, and so on, are partitions of their own, so that the numbers can be drawn in the order
    of the model.
    """
    made = named_after(_LeavingRandom, partitioner)(partitioner)
    made.apart = apart
    return made


class _LeavingRandom(LessPartitioner):
    apart: bool

    def refuse(self, node: Node, destination: DelegationSpec | None) -> tuple[str, str] | None:
        if host_calls.is_host_call(node):
            return ("higher-order", host_calls.REASON)
        return ("random", REASON) if is_random(node) else None

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Partition as the other one, without what is random."""
        result = super().partition(exported_program)
        if not self.apart:
            return result
        divided: dict[str, DelegationSpec] = {}
        for _, inner in graphs.walk(result.tagged_exported_program.graph_module):
            for node, drawn in _count_drawn(inner).items():
                tag = node.meta.get(graphs.DELEGATION_TAG)
                if tag in result.partition_tags:
                    node.meta[graphs.DELEGATION_TAG] = f"{tag}_{drawn}"
                    divided[f"{tag}_{drawn}"] = result.partition_tags[tag]
        return ExplainedResult(result.tagged_exported_program, divided, result.rejections, result.adjustments)


def _count_drawn(module: GraphModule) -> dict[Node, int]:
    """Return for each node up to which random number has to be drawn before it; no edge leads to fewer."""
    counts: dict[Node, int] = {}
    drawn = 0
    for node in module.graph.nodes:
        counts[node] = max((counts[source] for source in node.all_input_nodes), default=0)
        if is_random(node):
            drawn += 1
            counts[node] = drawn
    return counts
