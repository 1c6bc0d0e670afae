"""The graph that views draw: a vertex per partition and per region of host operators; and the boxes of a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import networkx as nx

from exir_lowering.graphs.order import topological
from exir_lowering.graphs.schedule import dag, schedule
from exir_lowering.plans import formatting
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
        title = formatting.name_nodes(nodes) + (f", in {graph}" if graph else "")
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


MOST_BOXES = 30
"""How many boxes a picture has."""

_PERIOD = 60
"""How many vertices a layer that is repeated may have."""


@dataclass(frozen=True, slots=True)
class Box:
    """Vertices that follow one another in topological order, drawn as one."""

    vertices: tuple[Vertex, ...]
    times: int = 1  # how often the same vertices are repeated in it

    @property
    def nodes(self) -> tuple[PlannedNode, ...]:
        """All operators in it."""
        return tuple(node for vertex in self.vertices for node in vertex.nodes)

    @property
    def title(self) -> str:
        """What it is, with the number of its repetitions."""
        name = self.vertices[0].title if len(self.vertices) == 1 else formatting.name_nodes(self.nodes)
        return name if self.times == 1 else f"{self.times} x {name}"

    @property
    def operators(self) -> str:
        """What it computes, and each time if it is repeated."""
        one = Box(self.vertices[: len(self.vertices) // self.times])
        return ("each " if self.times > 1 else "") + formatting.count_operators(one.nodes)

    @property
    def where(self) -> str:
        """Where it runs: a backend or the host, or how much of it on which."""
        if len(self.vertices) == 1:
            return self.vertices[0].where
        counts = Counter(vertex.where for vertex in self.vertices)
        return ", ".join(f"{count:,} x {where}" for where, count in counts.items())

    @property
    def backend(self) -> str | None:
        """The first backend in it, None if all of it is on the host."""
        return next((vertex.backend for vertex in self.vertices if vertex.backend is not None), None)


def fold(picture: Picture, most: int = MOST_BOXES) -> list[Box]:
    """Return a picture's boxes, at most so many: stretches of the topological order, so that they form no cycle."""
    boxes = _repeated(picture.vertices)
    depth = max((name.count(".") for box in boxes for name in _modules(box)), default=0)
    names: dict[int, tuple[Box, list[str]]] = {}  # of each box once, by its identity
    while len(boxes) > most and depth >= 0:
        for box in boxes:
            if id(box) not in names:
                names[id(box)] = box, formatting.name_modules(_modules(box)).split(".")
        boxes = _joined(boxes, [names[id(box)][1][: depth + 1] for box in boxes])
        depth -= 1
    if len(boxes) > most:
        boxes = _joined(boxes, [[str(i * most // len(boxes))] for i in range(len(boxes))])
    return boxes


def edges_between(picture: Picture, boxes: Sequence[Box]) -> dict[tuple[int, int], int]:
    """Return the bytes that go from box to box, by their numbers."""
    owner = {vertex.id: i for i, box in enumerate(boxes) for vertex in box.vertices}
    handed: dict[tuple[int, int], int] = {}
    for edge in picture.edges:
        pair = owner[edge.source], owner[edge.target]
        if pair[0] != pair[1]:
            handed[pair] = handed.get(pair, 0) + edge.bytes
    return handed


def _modules(box: Box) -> list[str]:
    return [node.module for node in box.nodes]


def _repeated(vertices: Sequence[Vertex]) -> list[Box]:
    """Make a box of each longest stretch that repeats the same vertices, and of each other vertex."""
    kinds: dict[object, int] = {}
    row = [
        kinds.setdefault((v.backend, frozenset(Counter(node.operator for node in v.nodes).items())), len(kinds))
        for v in vertices
    ]
    boxes, start = [], 0
    while start < len(row):
        period, times = 1, 1
        for length in range(1, min(_PERIOD, (len(row) - start) // 2) + 1):
            count = 1
            while row[start + count * length : start + (count + 1) * length] == row[start : start + length]:
                count += 1
            if length * (count - 1) > max(1, period * (times - 1)):  # two of a kind are not worth it
                period, times = length, count
        boxes.append(Box(tuple(vertices[start : start + period * times]), times))
        start += period * times
    return boxes


def _joined(boxes: Sequence[Box], keys: Sequence[list[str]]) -> list[Box]:
    """Join boxes that follow one another and have the same key."""
    joined: list[list[Box]] = []
    for i, box in enumerate(boxes):
        if i and keys[i] == keys[i - 1] and keys[i] != [""]:
            joined[-1].append(box)
        else:
            joined.append([box])
    return [
        same[0] if len(same) == 1 else Box(tuple(vertex for box in same for vertex in box.vertices)) for same in joined
    ]
