"""Cut a directed acyclic graph into ordered pieces within limits, where the fewest bytes cross.

A value is a net: the vertex that makes it and those that read it. It crosses once for each further piece that has one
of them, which is the connectivity metric of hypergraph partitioning; along each edge, the piece number must not
decrease. For a given topological order, the cheapest segments are found exactly, by dynamic programming; then
single vertices move between pieces while that helps. Several orders are tried, as in Herrmann et al., Multilevel
Algorithms for Acyclic Partitioning of Directed Acyclic Graphs (SIAM J. Sci. Comput. 41(4), 2019), whose moves follow
the same rule.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np

from exir_lowering.graphs.order import LeastFirst, topological
from exir_lowering.graphs.together import Sets

_EFFORT = 60_000
"""The most pins of nets to visit, over all orders; three orders are tried in any case."""

_ORDERS = 128
"""The most orders to try."""

_WIDE = 32
"""A value that more pieces share than this does not attract vertices."""

_PASSES = 8
"""The most sweeps of moves."""


@dataclass(frozen=True, slots=True)
class CutProblem:
    """What is cut; no vertex exceeds a limit, and None is no limit."""

    successors: Sequence[Sequence[int]]  # for each vertex, those after it, each once; in topological order
    sizes: Sequence[int]  # for each vertex, its number of operators
    weights: Sequence[Sequence[int]]  # for each vertex, the numbers of the constants that it reads, each once
    weight_bytes: Sequence[int]  # of each constant; a piece has each of its constants once
    # For each value, its bytes and the vertices that make or read it, each once.
    nets: Sequence[tuple[int, Sequence[int]]]
    max_size: int | None = None  # the most operators of a piece
    max_weight_bytes: int | None = None  # the most bytes of constants of a piece


def count_crossing(nets: Sequence[tuple[int, Sequence[int]]], pieces: Sequence[int]) -> int:
    """Return the bytes that cross: those of each value, once for each piece with its vertices except one."""
    return sum(size * (len({pieces[vertex] for vertex in pins}) - 1) for size, pins in nets)


def cut(problem: CutProblem) -> list[int]:
    """Return the number of each vertex's piece, at or near the optimum for small graphs, in near-linear time."""
    graph = _Graph(problem)
    if graph.bound[1] <= 1:
        return [0] * graph.count
    best: list[int] = []
    least: tuple[int, int] | None = None
    pins = sum(len(pins) for _, pins in graph.nets) + graph.count
    for order in islice(graph.generate_orders(), max(3, min(_ORDERS, _EFFORT // pins))):
        pieces = graph.improve(order)
        cost = graph.compute_cost(pieces)
        if least is None or cost < least:
            best, least, first = pieces, cost, order
        if least <= graph.bound:
            return best
    return graph.settle(best, first)


class _Graph:
    """A problem with look-up tables: neighbours, and the nets of each vertex."""

    def __init__(self, problem: CutProblem) -> None:
        self.problem = problem
        self.count = len(problem.successors)
        self.predecessors: list[list[int]] = [[] for _ in range(self.count)]
        for vertex, following in enumerate(problem.successors):
            for after in following:
                self.predecessors[after].append(vertex)
        self.nets = [(size, tuple(pins)) for size, pins in problem.nets if size and len(pins) > 1]
        self.nets_of: list[list[int]] = [[] for _ in range(self.count)]
        for number, (_, pins) in enumerate(self.nets):
            for vertex in pins:
                self.nets_of[vertex].append(number)
        self.max_size = sum(problem.sizes) if problem.max_size is None else problem.max_size
        total = sum(problem.weight_bytes)
        self.max_weight_bytes = total if problem.max_weight_bytes is None else problem.max_weight_bytes
        by_size = -(-sum(problem.sizes) // max(1, self.max_size))
        self.bound = (0, max(by_size, -(-total // max(1, self.max_weight_bytes))))

    def compute_cost(self, pieces: Sequence[int]) -> tuple[int, int]:
        """Return the bytes that cross and the number of pieces, which are minimised in this order."""
        return count_crossing(self.nets, pieces), len(set(pieces))

    def improve(self, order: Sequence[int]) -> list[int]:
        """Cut an order into segments, then move vertices."""
        return _number(_Moves(self, self.find_segments(order)).run())

    def settle(self, pieces: list[int], order: Sequence[int]) -> list[int]:
        """Cut the order that results from the moves, and move again, as long as that helps."""
        cost = self.compute_cost(pieces)
        position = {vertex: i for i, vertex in enumerate(order)}
        while True:
            row = sorted(position, key=lambda vertex: (pieces[vertex], position[vertex]))
            further = self.improve(row)
            if self.compute_cost(further) >= cost:
                return pieces
            pieces, cost = further, self.compute_cost(further)

    # -- segments of an order ------------------------------------------------------------------------------------------

    def find_segments(self, order: Sequence[int]) -> list[int]:
        """Return, for each vertex, its segment in the cheapest segmentation of an order."""
        position = {vertex: i for i, vertex in enumerate(order)}
        before: list[list[tuple[int, int]]] = [[] for _ in order]
        scale = len(order) + 1  # bytes first, then segments
        for size, pins in self.nets:
            for one, other in pairwise(sorted([position[vertex] for vertex in pins])):
                before[other].append((one, size * scale))
        # What it costs to cut the order before a position, plus what a segment from there to the current vertex reads.
        starts, costs = np.zeros(len(order), np.int64), 0
        chosen: list[int] = []
        for i, start in enumerate(self._find_windows(order)):
            starts[i] = costs
            # A segment that starts between the two vertices of a value and has the second one reads it from outside.
            for one, size in before[i]:
                starts[max(one + 1, start) : i + 1] += size
            chosen.append(start + int(starts[start : i + 1].argmin()))
            costs = int(starts[chosen[-1]]) + 1
        pieces = [0] * len(order)
        end = len(order)
        while end:
            start = chosen[end - 1]
            for i in range(start, end):
                pieces[order[i]] = start
            end = start
        # Numbered by their starts, which increase along the order.
        return _number(pieces)

    def _find_windows(self, order: Sequence[int]) -> Iterator[int]:
        """Yield, for each position of an order, the start of the longest segment within the caps that ends there."""
        problem, start, size, held = self.problem, 0, 0, 0
        readers = [0] * len(problem.weight_bytes)
        for vertex in order:
            size += problem.sizes[vertex]
            for weight in problem.weights[vertex]:
                held += 0 if readers[weight] else problem.weight_bytes[weight]
                readers[weight] += 1
            while size > self.max_size or held > self.max_weight_bytes:
                size -= problem.sizes[order[start]]
                for weight in problem.weights[order[start]]:
                    readers[weight] -= 1
                    held -= 0 if readers[weight] else problem.weight_bytes[weight]
                start += 1
            yield start

    # -- orders --------------------------------------------------------------------------------------------------------

    def generate_orders(self) -> Iterator[list[int]]:
        """Yield topological orders without end; most keep together the parts that share no edge."""
        following, preceding = self.problem.successors, self.predecessors
        forwards, backwards = list(range(self.count)), list(range(self.count - 1, -1, -1))
        parts = self._number_components()
        yield forwards
        yield sorted(_search_depth_first(preceding, forwards), key=parts.__getitem__)  # what each result needs
        needing = _search_depth_first(following, backwards)[::-1]  # after each vertex, what needs it
        yield sorted(needing, key=parts.__getitem__)
        chance = random.Random(0)
        while True:
            keys = [chance.random() for _ in forwards]
            roots = sorted(forwards, key=keys.__getitem__)
            for edges in (preceding, following):
                order = _search_depth_first([sorted(others, key=keys.__getitem__) for others in edges], roots)
                order = order if edges is preceding else order[::-1]
                yield sorted(order, key=lambda vertex: keys[parts[vertex]])
            yield topological(following, LeastFirst(keys.__getitem__))

    def _number_components(self) -> list[int]:
        """Number the parts that share no edge, by their first vertices."""
        parts = Sets(self.count)
        for vertex, following in enumerate(self.problem.successors):
            for after in following:
                parts.join(vertex, after)
        return list(map(parts.find, range(self.count)))


def _search_depth_first(edges: Sequence[Sequence[int]], roots: Sequence[int]) -> list[int]:
    """Return the vertices in the order in which a depth-first search leaves them."""
    seen = [False] * len(edges)
    order: list[int] = []
    for root in roots:
        if seen[root]:
            continue
        seen[root] = True
        stack = [(root, iter(edges[root]))]
        while stack:
            vertex, others = stack[-1]
            other = next((o for o in others if not seen[o]), None)
            if other is None:
                stack.pop()
                order.append(vertex)
            else:
                seen[other] = True
                stack.append((other, iter(edges[other])))
    return order


def _number(pieces: Sequence[int]) -> list[int]:
    """Number pieces 0, 1, ... in their order."""
    number = {piece: i for i, piece in enumerate(sorted(set(pieces)))}
    return [number[piece] for piece in pieces]


class _Moves:
    """Pieces while single vertices move between them."""

    def __init__(self, graph: _Graph, pieces: list[int]) -> None:
        self.graph, self.pieces = graph, pieces
        count = max(pieces, default=-1) + 1
        self.members, self.sizes, self.held = [0] * count, [0] * count, [0] * count
        self.readers: list[dict[int, int]] = [{} for _ in range(count)]
        for vertex, piece in enumerate(pieces):
            self._put(vertex, piece)
        self.pins = [Counter(pieces[vertex] for vertex in vertices) for _, vertices in graph.nets]

    def run(self) -> list[int]:
        """Sweep forwards and backwards until nothing moves."""
        for i in range(_PASSES):
            row = range(len(self.pieces)) if i % 2 else range(len(self.pieces) - 1, -1, -1)
            moved = [self._try(vertex) for vertex in row]
            if i and not any(moved):
                break
        return self.pieces

    def _try(self, vertex: int) -> bool:
        """Move a vertex to the piece that makes the fewest bytes cross; return whether it moved."""
        pieces, here = self.pieces, self.pieces[vertex]
        nets = self.graph.nets_of[vertex]
        if self.members[here] > 1 and all(len(self.pins[net]) == 1 for net in nets):
            return False
        low = max((pieces[before] for before in self.graph.predecessors[vertex]), default=0)
        high = min((pieces[after] for after in self.graph.problem.successors[vertex]), default=len(self.members) - 1)
        if low == high:
            return False
        empties = self.members[here] == 1
        for change, piece in sorted(self._find_changes(nets, here, low, high)):
            if change > 0 or (change == 0 and not empties):
                return False
            if self._fits(vertex, piece):
                self._move(vertex, here, piece)
                return True
        return False

    def _find_changes(self, nets: Sequence[int], here: int, low: int, high: int) -> list[tuple[int, int]]:
        """Return the pieces that the values of a vertex reach, each with the additional bytes that would cross."""
        reached: dict[int, None] = {}
        for net in nets:
            if len(self.pins[net]) <= _WIDE:
                reached.update(dict.fromkeys(self.pins[net]))
        changes = []
        for piece in reached:
            if piece != here and low <= piece <= high:
                change = 0
                for net in nets:
                    pins = self.pins[net]
                    change += self.graph.nets[net][0] * ((piece not in pins) - (pins[here] == 1))
                changes.append((change, piece))
        return changes

    def _fits(self, vertex: int, piece: int) -> bool:
        problem = self.graph.problem
        if self.sizes[piece] + problem.sizes[vertex] > self.graph.max_size:
            return False
        more = sum(problem.weight_bytes[w] for w in problem.weights[vertex] if not self.readers[piece].get(w))
        return self.held[piece] + more <= self.graph.max_weight_bytes

    def _put(self, vertex: int, piece: int) -> None:
        problem = self.graph.problem
        self.members[piece] += 1
        self.sizes[piece] += problem.sizes[vertex]
        readers = self.readers[piece]
        for weight in problem.weights[vertex]:
            if not readers.get(weight):
                self.held[piece] += problem.weight_bytes[weight]
            readers[weight] = readers.get(weight, 0) + 1

    def _move(self, vertex: int, here: int, there: int) -> None:
        problem = self.graph.problem
        self.members[here] -= 1
        self.sizes[here] -= problem.sizes[vertex]
        for weight in problem.weights[vertex]:
            self.readers[here][weight] -= 1
            if not self.readers[here][weight]:
                self.held[here] -= problem.weight_bytes[weight]
        self._put(vertex, there)
        self.pieces[vertex] = there
        for net in self.graph.nets_of[vertex]:
            pins = self.pins[net]
            pins[there] += 1
            pins[here] -= 1
            if not pins[here]:
                del pins[here]
