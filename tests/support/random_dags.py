"""Random directed acyclic graphs as FX graphs, what torch.fx's partitioner makes of them, and brute force."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import networkx as nx
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import create_op_support

LABEL = "label"
"""The key of node.meta with the backend that takes a node, None for the host."""


def random_graph(rng: random.Random, nodes: int, labels: Sequence[str | None] = ("A", None)) -> GraphModule:
    """Return a graph of `nodes` operators, each labelled, that reads near and far results, some of several values."""
    graph = Graph()
    values: list[Node] = [graph.placeholder("x"), graph.placeholder("y")]
    for value in values:
        value.meta["val"] = torch.empty(rng.choice([1, 4, 16]), device="meta")
    reach, share = rng.choice([3, 8, 40]), rng.choice([0.3, 0.5, 0.8, 0.95])
    made = 0
    while made < nodes:
        near = values[-reach:]
        read = rng.sample(near, min(len(near), rng.randint(1, 3)))
        label = labels[0] if rng.random() < share else rng.choice(labels)
        node = graph.call_function(_operator, tuple(read))
        node.meta.update({LABEL: label, "val": torch.empty(rng.choice([1, 4, 16]), device="meta")})
        made += 1
        if rng.random() < 0.1:
            node.meta["val"] = [torch.empty(4, device="meta"), torch.empty(16, device="meta")]
            for i in range(2):
                item = graph.call_function(_getitem, (node, i))
                item.meta["val"] = node.meta["val"][i]
                values.append(item)
        else:
            values.append(node)
    graph.output(tuple(value for value in values if not value.users and value.op == "call_function"))
    return GraphModule({}, graph)


def _operator(*values: Any) -> Any:
    return values[0]


_getitem = operator.getitem


def label(node: Node) -> Any:
    return node.meta.get(LABEL)


def operators(graph_module: GraphModule) -> list[Node]:
    return [node for node in graph_module.graph.nodes if node.target is _operator]


def upstream_partitions(graph_module: GraphModule) -> list[list[Node]]:
    """Return what torch.fx's partitioner proposes for label A."""
    support = create_op_support(lambda modules, node: label(node) == "A" or node.target is _getitem)
    partitioner = CapabilityBasedPartitioner(graph_module, support, allows_single_node_partition=True)
    return [list(partition.nodes) for partition in partitioner.propose_partitions()]


def contracts(graph_module: GraphModule, partitions: Iterable[Sequence[Node]]) -> bool:
    """Tell whether the graph is acyclic once each partition is one vertex."""
    part_of = {node: i for i, nodes in enumerate(partitions) for node in nodes}
    contracted = nx.DiGraph()
    for node in graph_module.graph.nodes:
        for user in node.users:
            one, other = part_of.get(node, node), part_of.get(user, user)
            if one != other:
                contracted.add_edge(one, other)
    return nx.is_directed_acyclic_graph(contracted)


def minimum(graph_module: GraphModule, labels: Mapping[Node, str]) -> int:
    """Return the least number of convex partitions, by trying every way to divide the labelled nodes."""
    claimed = [node for node in operators(graph_module) if labels.get(node) is not None]
    picked = {node: [user for user in node.users if user.target is _getitem] for node in claimed}
    best = len(claimed)
    for division in _divisions(len(claimed), best):
        count = max(division, default=-1) + 1
        if count >= best:
            continue
        parts: list[list[Node]] = [[] for _ in range(count)]
        for node, part in zip(claimed, division, strict=True):
            parts[part] += [node, *picked[node]]
        same = all(len({labels[node] for node in part if node in labels}) == 1 for part in parts)
        if same and contracts(graph_module, parts):
            best = count
    return best


def _divisions(count: int, most: int) -> Iterable[tuple[int, ...]]:
    """Yield every division of `count` things into at most `most` parts, as the part of each."""
    if count == 0:
        yield ()
        return
    for division in _divisions(count - 1, most):
        for part in range(min(max(division, default=-1) + 2, most)):
            yield (*division, part)


def chain(length: int, unsupported_every: int) -> GraphModule:
    """Return a chain in which every so-manieth node is left to the host."""
    graph = Graph()
    value = graph.placeholder("x")
    for i in range(length):
        value = graph.call_function(_operator, (value,))
        value.meta[LABEL] = None if i % unsupported_every == unsupported_every - 1 else "A"
    graph.output(value)
    return GraphModule({}, graph)


def seeds(count: int) -> Iterable[random.Random]:
    return (random.Random(seed) for seed in itertools.islice(itertools.count(), count))
