"""What must stay together in a graph: a node and its getitems, groups, and what a group encloses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import networkx as nx
from torch.fx import Node

from exir_lowering.graphs.walking import is_getitem


class Sets:
    """Disjoint sets of the numbers below a count, each named by its lowest number."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def find(self, item: int) -> int:
        """Return the name of the set that contains a number."""
        root, parent = item, self._parent
        while parent[root] != root:
            root = parent[root]
        while parent[item] != root:
            parent[item], item = root, parent[item]
        return root

    def join(self, one: int, other: int) -> None:
        """Merge the sets of two numbers."""
        one, other = self.find(one), self.find(other)
        if one != other:
            self._parent[max(one, other)] = min(one, other)


class Together:
    """The computing nodes of a graph, in sets that stay together; a set is named by the position of its first node.

    Args:
        nodes: The nodes, in graph order. From the start, a getitem is in the set of its producer.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.place = {node: i for i, node in enumerate(nodes)}
        self.sets = Sets(len(nodes))
        for i, node in enumerate(nodes):
            producer = self.place.get(node.args[0]) if is_getitem(node) else None  # type: ignore[arg-type]
            if producer is not None:
                self.sets.join(producer, i)

    def find(self, node: Node) -> int:
        """Return the name of the set that contains a node."""
        return self.sets.find(self.place[node])

    def join(self, group: Iterable[Node]) -> bool:
        """Keep the nodes of a group that are in the graph together; return whether there are several."""
        places = [self.place[node] for node in group if node in self.place]
        for other in places[1:]:
            self.sets.join(places[0], other)
        return len(places) > 1

    def successors(self) -> dict[int, dict[int, None]]:
        """Return, for each set in graph order, the sets that read its results."""
        found: dict[int, dict[int, None]] = {}
        for i, node in enumerate(self.nodes):
            root = self.sets.find(i)
            following = found.setdefault(root, {})
            for user in node.users:
                if user in self.place:
                    other = self.find(user)
                    if other != root:
                        following[other] = None
        return found

    def knots(self) -> Iterator[list[int]]:
        """Yield the sets of each strongly connected component: together they are convex, alone they are not."""
        graph = nx.DiGraph([(root, other) for root, after in self.successors().items() for other in after])
        for component in nx.strongly_connected_components(graph):
            if len(component) > 1:
                yield sorted(component)

    def close(self) -> None:
        """Merge the sets of each strongly connected component."""
        for first, *others in list(self.knots()):
            for other in others:
                self.sets.join(first, other)

    def members(self) -> dict[int, list[Node]]:
        """Return the nodes of each set in graph order, by the set's name."""
        found: dict[int, list[Node]] = {}
        for i, node in enumerate(self.nodes):
            found.setdefault(self.sets.find(i), []).append(node)
        return found
