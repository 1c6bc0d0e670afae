"""The graph that the views draw, without cycles: a vertex per partition, and per region of host operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import networkx as nx

from exir_lowering.graphs.order import topological
from exir_lowering.graphs.schedule import dag, schedule
from exir_lowering.plans import naming
from exir_lowering.plans.planned import MethodPlan, PlannedNode


@dataclass(frozen=True, slots=True)
class Vertex:
    """A partition, or connected host operators."""

    id: str  # unique: "partition:" and the partition's id, or "host:" and a number
    kind: Literal["partition", "host"]
    title: str  # what it is: its modules, and the nested graph that it is in
    backend: str | None  # None for the host
    nodes: tuple[PlannedNode, ...]  # its operators, in the method's order

    @property
    def where(self) -> str:
        """Where it runs."""
        return "host" if self.backend is None else self.backend


@dataclass(frozen=True, slots=True)
class Edge:
    """What one vertex hands to another."""

    source: str  # the id of the vertex that makes the values
    target: str  # the id of the vertex that reads them
    bytes: int  # of the values, each counted once; 0 from a call to the nested graph that it calls


@dataclass(frozen=True, slots=True)
class Picture:
    """A method, drawn."""

    vertices: tuple[Vertex, ...]  # in topological order
    edges: tuple[Edge, ...]


def picture(method: MethodPlan) -> Picture:
    """Contract a method's partitions and host operators; ValueError if those form a cycle."""
    members = _regions(method, _contract(method))
    owner = {name: key for key, names in members.items() for name in names}
    crossing = _crossing(method, owner)
    order = _topological(method, members, crossing)
    number = {key: i for i, key in enumerate(order)}
    by_name = {node.name: node for node in method.nodes}
    backends = {_partition_key(partition.id): partition.backend_id for partition in method.partitions}
    vertices: list[Vertex] = []
    regions = 0
    for key in order:
        nodes = tuple(by_name[name] for name in members[key])
        kind: Literal["partition", "host"] = "partition" if key in backends else "host"
        regions += kind == "host"
        graph = _graph_of(nodes[0].name) if nodes else ""
        title = naming.name_nodes(nodes) + (f", in {graph}" if graph else "")
        vertices.append(Vertex(key if key in backends else f"host:{regions}", kind, title, backends.get(key), nodes))
    edges = sorted((number[source], number[target]) for source, target in crossing)
    drawn = tuple(Edge(vertices[s].id, vertices[t].id, crossing[order[s], order[t]]) for s, t in edges)
    return Picture(tuple(vertices), drawn)


def _partition_key(partition: str) -> str:
    return f"partition:{partition}"


def _graph_of(name: str) -> str:
    """Return the path of the nested graph that holds a node, "" for the top graph."""
    return name.rpartition(".")[0]


def _contract(method: MethodPlan) -> dict[str, list[str]]:
    """Return the vertices, with each partition as one, and the names of their nodes."""
    known = {partition.id for partition in method.partitions}
    members: dict[str, list[str]] = {}
    for node in method.nodes:
        key = f"node:{node.name}" if node.partition not in known else _partition_key(str(node.partition))
        members.setdefault(key, []).append(node.name)
    for partition in method.partitions:
        members.setdefault(_partition_key(partition.id), [])
    return members


def _regions(method: MethodPlan, members: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Contract host operators that are connected, within one graph and one epoch of the schedule, which stays acyclic.

    Nested graphs divide an epoch into stages: the more often a path changes graphs, the later.
    """
    owner = {name: key for key, names in members.items() for name in names}
    crossing = _crossing(method, owner)
    order = _topological(method, members, crossing)
    number = {key: i for i, key in enumerate(order)}
    predecessors: list[list[int]] = [[] for _ in order]
    for source, target in crossing:
        predecessors[number[target]].append(number[source])
    epochs = schedule(dag(predecessors, [None if key.startswith("partition:") else "host" for key in order]))
    graphs = [_graph_of(members[key][0]) if members[key] else "" for key in order]
    joined = nx.Graph()
    joined.add_nodes_from(order)
    stages = [0] * len(order)
    for vertex, before in enumerate(predecessors):
        near = [other for other in before if epochs[other] == epochs[vertex] > 0]
        stages[vertex] = max((stages[other] + (graphs[other] != graphs[vertex]) for other in near), default=0)
        joined.add_edges_from(
            (order[other], order[vertex])
            for other in near
            if stages[other] == stages[vertex] and graphs[other] == graphs[vertex]
        )
    region = {key: min(part, key=number.__getitem__) for part in nx.connected_components(joined) for key in part}
    result: dict[str, list[str]] = {}
    for node in method.nodes:
        result.setdefault(region[owner[node.name]], []).append(node.name)
    for key, names in members.items():
        if not names:
            result[key] = []
    return result


def _crossing(method: MethodPlan, owner: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """Return the edges between vertices with the bytes that cross, each value once; calls of graphs have none."""
    sizes = {node.name: node.result_bytes for node in method.nodes}
    values: dict[tuple[str, str], dict[str, int]] = {}
    for node in method.nodes:
        for name in node.inputs:
            if name in owner and owner[name] != owner[node.name]:
                values.setdefault((owner[name], owner[node.name]), {})[name] = sizes[name]
    callers = {path: owner[node.name] for node in method.nodes for path in node.calls}
    for node in method.nodes:
        caller = callers.get(_graph_of(node.name))
        if caller not in (None, owner[node.name]) and not node.inputs:
            values.setdefault((str(caller), owner[node.name]), {})
    return {edge: sum(crossing.values()) for edge, crossing in values.items()}


def _topological(
    method: MethodPlan, members: Mapping[str, Sequence[str]], crossing: Mapping[tuple[str, str], int]
) -> list[str]:
    keys = list(members)
    number = {key: i for i, key in enumerate(keys)}
    successors: list[list[int]] = [[] for _ in keys]
    for source, user in crossing:
        successors[number[source]].append(number[user])
    order = topological(successors)
    if len(order) < len(keys):
        cycle = " -> ".join(source for source, _ in nx.find_cycle(nx.DiGraph(crossing.keys())))
        raise ValueError(f"method {method.name}: the partitions of the plan form a cycle: {cycle}")
    return [keys[i] for i in order]
