"""The graph that views draw: a vertex per partition and per region of host operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from exir_lowering.graphs.order import topological
from exir_lowering.graphs.schedule import schedule
from exir_lowering.plans import formatting
from exir_lowering.plans.planned import MethodPlan, PlannedNode


@dataclass(frozen=True, slots=True)
class Vertex:
    """A partition, or connected host operators."""

    title: str  # what it is: its modules, and the nested graph that it is in
    backend: str | None  # None for the host
    nodes: tuple[PlannedNode, ...]  # its operators, in the method's order
    partition: str = ""  # its id, "" for the host

    @property
    def where(self) -> str:
        """Where it runs."""
        return "host" if self.backend is None else self.backend


@dataclass(frozen=True, slots=True)
class Picture:
    """A method, drawn."""

    vertices: tuple[Vertex, ...]  # in topological order
    # By the numbers of two vertices, the bytes that one hands to the other, each value counted once; 0 from a call to
    # the nested graph that it calls.
    edges: Mapping[tuple[int, int], int]


def picture(method: MethodPlan) -> Picture:
    """Contract a method's partitions and host operators; ValueError if those form a cycle."""
    whole: dict[str | None, str] = {partition.id: f"partition:{partition.id}" for partition in method.partitions}
    owner = {node.name: whole.get(node.partition, f"node:{node.name}") for node in method.nodes}
    drawn = _Contracted(method, _regions(_Contracted(method, owner)))
    partitions = {whole[partition.id]: partition for partition in method.partitions}
    vertices: list[Vertex] = []
    for key, nodes in zip(drawn.keys, drawn.members, strict=True):
        graph, partition = _graph_of(nodes), partitions.get(key)
        title = formatting.name_nodes(nodes) + (f", in {graph}" if graph else "")
        backend, id_ = (None, "") if partition is None else (partition.backend_id, partition.id)
        vertices.append(Vertex(title, backend, tuple(nodes), id_))
    return Picture(tuple(vertices), dict(sorted(drawn.edges.items())))


def _graph_of(nodes: Sequence[PlannedNode]) -> str:
    """Return the path of the nested graph that holds some nodes, "" for the top graph, and for no node."""
    return nodes[0].name.rpartition(".")[0] if nodes else ""


class _Contracted:
    """A method whose nodes are parts of vertices with keys: in topological order, with what crosses between them."""

    def __init__(self, method: MethodPlan, owner: Mapping[str, str]) -> None:
        members: dict[str, list[PlannedNode]] = {}
        for node in method.nodes:
            members.setdefault(owner[node.name], []).append(node)
        for partition in method.partitions:  # without an operator, too
            members.setdefault(f"partition:{partition.id}", [])
        crossing, keys = _crossing(method, owner), list(members)
        number = {key: i for i, key in enumerate(keys)}
        successors: list[list[int]] = [[] for _ in keys]
        for source, user in crossing:
            successors[number[source]].append(number[user])
        order = topological(successors)
        if len(order) < len(keys):
            cycle = " -> ".join(source for source, _ in nx.find_cycle(nx.DiGraph(crossing.keys())))
            raise ValueError(f"method {method.name}: the partitions of the plan form a cycle: {cycle}")
        self.keys = [keys[i] for i in order]
        self.members = [members[key] for key in self.keys]
        number = {key: i for i, key in enumerate(self.keys)}
        self.edges = {(number[source], number[user]): size for (source, user), size in crossing.items()}


def _regions(contracted: _Contracted) -> dict[str, str]:
    """Return the key of each node's vertex, with host operators contracted that are connected, in one graph and epoch.

    Nested graphs divide an epoch into stages: the more often a path changes graphs, the later. So it stays acyclic.
    """
    predecessors: list[list[int]] = [[] for _ in contracted.keys]
    for source, target in contracted.edges:
        predecessors[target].append(source)
    epochs = schedule(predecessors, [not key.startswith("partition:") for key in contracted.keys])
    graphs = list(map(_graph_of, contracted.members))
    joined = nx.Graph()
    joined.add_nodes_from(range(len(graphs)))
    stages = [0] * len(graphs)
    for vertex, before in enumerate(predecessors):
        near = [other for other in before if epochs[other] == epochs[vertex] > 0]
        stages[vertex] = max((stages[other] + (graphs[other] != graphs[vertex]) for other in near), default=0)
        joined.add_edges_from(
            (other, vertex) for other in near if stages[other] == stages[vertex] and graphs[other] == graphs[vertex]
        )
    parts = ((contracted.keys[min(part)], i) for part in nx.connected_components(joined) for i in part)
    return {node.name: key for key, i in parts for node in contracted.members[i]}


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
        caller = callers.get(_graph_of([node]))
        if caller not in (None, owner[node.name]) and not node.inputs:
            values.setdefault((str(caller), owner[node.name]), {})
    return {edge: sum(crossing.values()) for edge, crossing in values.items()}
