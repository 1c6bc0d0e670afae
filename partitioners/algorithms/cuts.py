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


def count_crossing(nets: Sequence[tuple[int, Sequence[int]]], pieces: Sequence[int]) -> int:
    """Return the bytes that cross: those of each value, once for each piece with its vertices except one."""
    return sum(size * (len({pieces[vertex] for vertex in pins}) - 1) for size, pins in nets)


class CutProblem:
    """What is cut, with the neighbours and the nets of each vertex; no vertex exceeds a limit, and None is no limit."""

    def __init__(
        self,
        successors: Sequence[Sequence[int]],  # for each vertex, those after it, each once; in topological order
        sizes: Sequence[int],  # for each vertex, its number of operators
        weights: Sequence[Sequence[int]],  # for each vertex, the numbers of the constants that it reads, each once
        weight_bytes: Sequence[int],  # of each constant; a piece has each of its constants once
        nets: Sequence[tuple[int, Sequence[int]]],  # of each value, its bytes, and what makes or reads it, each once
        max_size: int | None = None,  # the most operators of a piece
        max_weight_bytes: int | None = None,  # the most bytes of constants of a piece
    ) -> None:
        self.successors, self.sizes, self.weights, self.weight_bytes = successors, sizes, weights, weight_bytes
        self.count = len(successors)
        self.predecessors: list[list[int]] = [[] for _ in successors]
        for vertex, following in enumerate(successors):
            for after in following:
                self.predecessors[after].append(vertex)
        self.nets = [(size, tuple(pins)) for size, pins in nets if size and len(pins) > 1]
        self.nets_of: list[list[int]] = [[] for _ in successors]
        for number, (_, pins) in enumerate(self.nets):
            for vertex in pins:
                self.nets_of[vertex].append(number)
        total_size, total_bytes = sum(sizes), sum(weight_bytes)
        self.max_size = total_size if max_size is None else max_size
        self.max_weight_bytes = total_bytes if max_weight_bytes is None else max_weight_bytes
        by_size = -(-total_size // max(1, self.max_size))
        self.bound = (0, max(by_size, -(-total_bytes // max(1, self.max_weight_bytes))))

    def cut(self) -> list[int]:
        """Return the number of each vertex's piece, at or near the optimum for small graphs, in near-linear time."""
        if self.bound[1] <= 1:
            return [0] * self.count
        best: list[int] = []
        least: tuple[int, int] | None = None
        pins = sum(len(pins) for _, pins in self.nets) + self.count
        for order in islice(self.generate_orders(), max(3, min(_ORDERS, _EFFORT // pins))):
            pieces = self.improve(order)
            cost = self.compute_cost(pieces)
            if least is None or cost < least:
                best, least, first = pieces, cost, order
            if least <= self.bound:
                return best
        return self.settle(best, first)

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
        start, size, held = 0, 0, 0
        readers = [0] * len(self.weight_bytes)
        for vertex in order:
            size += self.sizes[vertex]
            for weight in self.weights[vertex]:
                held += 0 if readers[weight] else self.weight_bytes[weight]
                readers[weight] += 1
            while size > self.max_size or held > self.max_weight_bytes:
                size -= self.sizes[order[start]]
                for weight in self.weights[order[start]]:
                    readers[weight] -= 1
                    held -= 0 if readers[weight] else self.weight_bytes[weight]
                start += 1
            yield start

    # -- orders --------------------------------------------------------------------------------------------------------

    def generate_orders(self) -> Iterator[list[int]]:
        """Yield topological orders without end; most keep together the parts that share no edge."""
        following, preceding = self.successors, self.predecessors
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
        for vertex, following in enumerate(self.successors):
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

    def __init__(self, problem: CutProblem, pieces: list[int]) -> None:
        self.problem, self.pieces = problem, pieces
        count = max(pieces, default=-1) + 1
        self.members, self.sizes, self.held = [0] * count, [0] * count, [0] * count
        self.readers: list[dict[int, int]] = [{} for _ in range(count)]
        self.pins: list[Counter[int]] = [Counter() for _ in problem.nets]
        for vertex, piece in enumerate(pieces):
            self._count(vertex, piece, 1)

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
        nets = self.problem.nets_of[vertex]
        if self.members[here] > 1 and all(len(self.pins[net]) == 1 for net in nets):
            return False
        low = max((pieces[before] for before in self.problem.predecessors[vertex]), default=0)
        high = min((pieces[after] for after in self.problem.successors[vertex]), default=len(self.members) - 1)
        if low == high:
            return False
        empties = self.members[here] == 1
        for change, piece in sorted(self._find_changes(nets, here, low, high)):
            if change > 0 or (change == 0 and not empties):
                return False
            if self._fits(vertex, piece):
                self._count(vertex, here, -1)
                self._count(vertex, piece, 1)
                pieces[vertex] = piece
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
                    change += self.problem.nets[net][0] * ((piece not in pins) - (pins[here] == 1))
                changes.append((change, piece))
        return changes

    def _fits(self, vertex: int, piece: int) -> bool:
        problem = self.problem
        if self.sizes[piece] + problem.sizes[vertex] > problem.max_size:
            return False
        more = sum(problem.weight_bytes[w] for w in problem.weights[vertex] if not self.readers[piece].get(w))
        return self.held[piece] + more <= problem.max_weight_bytes

    def _count(self, vertex: int, piece: int, by: int) -> None:
        """Add a vertex to a piece, or take it away: by -1."""
        problem, readers = self.problem, self.readers[piece]
        self.members[piece] += by
        self.sizes[piece] += by * problem.sizes[vertex]
        for weight in problem.weights[vertex]:
            before = readers.get(weight, 0)
            readers[weight] = before + by
            if not before or not readers[weight]:
                self.held[piece] += by * problem.weight_bytes[weight]
        for net in problem.nets_of[vertex]:
            pins = self.pins[net]
            pins[piece] += by
            if not pins[piece]:
                del pins[piece]
