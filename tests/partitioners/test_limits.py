"""Limits: what is too large is cut, what is too small or too many is dropped."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import networkx as nx
import pytest
import torch
from lowering_support import edge_program
from torch.fx import Graph, GraphModule, Node

import exir_lowering
from exir_lowering import Adjustment, InputError, Rejection
from exir_lowering.graphs import measures, quotient
from exir_lowering.partitioners import SupportPartitioner, ops
from exir_lowering.partitioners.algorithms import limits
from exir_lowering.partitioners.algorithms.convex import Proposal, list_computing, propose_partitions
from exir_lowering.partitioners.algorithms.limits import Limits
from exir_lowering.partitioners.supports.predicates import everything
from exir_lowering.partitioners.supports.support import GraphScope, scopes

ATEN = torch.ops.aten
Result = tuple[list[Proposal], list[Rejection], list[Adjustment]]


class Builder:
    """Makes graphs whose values have the bytes that a test says."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.constants: list[Node] = []

    def input(self, name: str, size: int) -> Node:
        return self._sized(self.graph.placeholder(name), size)

    def constant(self, name: str, size: int) -> Node:
        self.constants.append(self.input(name, size))
        return self.constants[-1]

    def op(self, name: str, size: int, *read: Node) -> Node:
        """Make an operator that reads values; with one input it computes something, with more it does not."""
        node = self.graph.create_node("call_function", ATEN.cat.default, (list(read),), name=name)
        if len(read) == 1:
            node.target, node.args = ATEN.relu.default, (read[0],)
        return self._sized(node, size)

    def parts(self, name: str, sizes: Sequence[int], read: Node) -> list[Node]:
        """Make an operator with several results, and the getitems that pick them."""
        node = self.graph.create_node("call_function", ATEN.topk.default, (read, 1), name=name)
        node.meta["val"] = tuple(_tensor(size) for size in sizes)
        picked = [
            self.graph.create_node("call_function", operator.getitem, (node, i), name=f"{name}_{i}")
            for i in range(len(sizes))
        ]
        return [self._sized(pick, size) for pick, size in zip(picked, sizes, strict=True)]

    def scope(self, *results: Node, path: tuple[str, ...] = ()) -> GraphScope:
        self.graph.output(tuple(results))
        return GraphScope(GraphModule(torch.nn.Module(), self.graph), frozenset(self.constants), path)

    def _sized(self, node: Node, size: int) -> Node:
        node.meta["val"] = _tensor(size)
        return node


def _tensor(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="meta")


def random_scope(chance: random.Random, count: int) -> GraphScope:
    """Make a graph of `count` operators, some with two results, that read inputs, constants and each other."""
    build = Builder()
    sizes = (1, 2, 4, 8, 32, 100)
    values = [build.input(f"x{i}", chance.choice(sizes)) for i in range(chance.choice((1, 1, 2)))]
    constants = [build.constant(f"w{i}", chance.choice((1, 2, 3, 8))) for i in range(chance.choice((0, 2, count)))]
    for i in range(count):
        recent = values[-4:] if chance.random() < 0.6 else values
        read = [*chance.sample(recent, min(len(recent), chance.choice((1, 1, 2, 3))))]
        if chance.random() < 0.15:
            values += build.parts(f"n{i}", chance.choices(sizes, k=2), read[0])
        else:
            read += chance.sample(constants, min(len(constants), chance.choice((0, 1, 1, 2))))
            values.append(build.op(f"n{i}", chance.choice(sizes), *read))
    return build.scope(values[-1])


def random_groups(chance: random.Random, scope: GraphScope) -> list[list[Node]]:
    nodes = operators(list_computing(scope.graph_module))
    return [chance.sample(nodes, min(len(nodes), 2)) for _ in range(chance.choice((0, 0, 1, 2)))]


def random_limits(chance: random.Random) -> Limits:
    return Limits(
        max_nodes=chance.choice((None, 1, 2, 3, 4)),
        max_weight_bytes=chance.choice((None, 8, 11, 16)),
    )


# -- figures, counted anew ---------------------------------------------------------------------------------------------


def operators(nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if node.target is not operator.getitem]


def names(nodes: Sequence[Node]) -> str:
    return " ".join(node.name for node in nodes)


def weight_bytes(nodes: Sequence[Node], scope: GraphScope) -> int:
    return sum(measures.value_bytes(c) for c in scope.constants if any(c in node.all_input_nodes for node in nodes))


def within(nodes: Sequence[Node], limit: Limits, scope: GraphScope) -> bool:
    if limit.max_nodes is not None and len(operators(nodes)) > limit.max_nodes:
        return False
    return limit.max_weight_bytes is None or weight_bytes(nodes, scope) <= limit.max_weight_bytes


def require_valid(scope: GraphScope, kept: Sequence[Proposal]) -> None:
    """Require that the proposals can be contracted together, in their order."""
    nodes = list_computing(scope.graph_module)
    tag_of = {node: str(i) for i, proposal in enumerate(kept) for node in proposal.nodes}
    assert sum(len(proposal.nodes) for proposal in kept) == len(tag_of), "a node has two places"
    assert quotient.order(nodes, tag_of)[1] is None, "contracted, the proposals are on a cycle"
    contracted = nx.DiGraph([(str(i), str(i + 1)) for i in range(len(kept) - 1)])
    for node in nodes:
        for user in node.users:
            one, other = tag_of.get(node, node), tag_of.get(user, user)
            if one != other:
                contracted.add_edge(one, other)
    assert nx.is_directed_acyclic_graph(contracted), "the proposals are not in topological order"
    place = {node: i for i, node in enumerate(nodes)}
    for proposal in kept:
        assert list(proposal.nodes) == sorted(proposal.nodes, key=place.__getitem__)
        assert all(n.args[0] in proposal.nodes for n in proposal.nodes if n.target is operator.getitem)


def apply(scope: GraphScope, limit: Limits, groups: Sequence[Sequence[Node]] = ()) -> Result:
    return limits.apply(propose_partitions(scope, everything(), groups=groups), limit, scope, groups=groups, by="me")


# -- bad limits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"min_nodes": -1}, r"Limits\(min_nodes=-1\): expected an integer, 0 or more"),
        ({"min_flops": 1e6}, r"Limits\(min_flops=1000000.0\): expected an integer"),
        ({"max_partitions": 0}, r"Limits\(max_partitions=0\): expected an integer, 1 or more, or None"),
        ({"max_nodes": 0}, r"Limits\(max_nodes=0\)"),
        ({"min_nodes": 5, "max_nodes": 4}, r"Limits\(min_nodes=5, max_nodes=4\).* Expected min_nodes of at most 4"),
    ],
)
def test_bad_limits_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Limits(**given)


# -- cuts --------------------------------------------------------------------------------------------------------------


def test_a_chain_is_cut_where_the_next_operator_does_not_fit() -> None:
    build = Builder()
    value = build.input("x", 64)
    for i, size in enumerate((64, 4, 1024, 64, 64)):
        value = build.op(f"n{i}", size, value)
    kept, rejections, adjustments = apply(build.scope(value, path=("body_graph_0",)), Limits(max_nodes=3))
    assert [names(piece.nodes) for piece in kept] == ["n0 n1 n2", "n3 n4"]
    assert rejections == []
    said = "5 operators, max_nodes=3: cut into 2"
    assert adjustments == [Adjustment("", "cut", tuple(f"body_graph_0.n{i}" for i in range(5)), said, "me")]


def test_a_shared_constant_counts_in_both_pieces() -> None:
    build = Builder()
    shared, first, second = (build.constant(name, size) for name, size in (("s", 1000), ("w0", 1000), ("w1", 1000)))
    one = build.op("one", 8, build.input("x", 8), shared, first)
    scope = build.scope(build.op("two", 8, one, shared, second))
    kept, _, adjustments = apply(scope, Limits(max_weight_bytes=2000))
    assert [weight_bytes(piece.nodes, scope) for piece in kept] == [2000, 2000]
    assert [a.reason for a in adjustments] == ["3,000 bytes of weights, max_weight_bytes=2,000: cut into 2"]


@pytest.mark.parametrize("count", [6, 25, 90])
def test_random_graphs_with_host_operators_are_cut_within_the_caps(count: int) -> None:
    for seed in range(30):
        chance = random.Random(1000 * count + seed)
        scope = random_scope(chance, count)
        limit = random_limits(chance)
        host = {node for node in list_computing(scope.graph_module) if chance.random() < 0.15}
        groups = [
            group for group in random_groups(chance, scope) if not host.intersection(group) and chance.random() < 0.5
        ]
        try:
            proposals = propose_partitions(scope, lambda node, host=host: node not in host, groups=groups)
        except InputError:  # a group that the host is between
            groups, proposals = [], propose_partitions(scope, lambda node, host=host: node not in host)
        kept, rejections, adjustments = limits.apply(proposals, limit, scope, groups=groups, by="me")
        require_valid(scope, kept)
        assert all(within(piece.nodes, limit, scope) for piece in kept)
        proposed = [node.name for proposal in proposals for node in operators(proposal.nodes)]
        left = [node.name for piece in kept for node in operators(piece.nodes)]
        assert sorted(proposed) == sorted(left + [rejection.node for rejection in rejections])
        piece_of = {node: i for i, piece in enumerate(kept) for node in piece.nodes}
        assert all(len({piece_of.get(node) for node in group}) == 1 for group in groups), "a group was cut"
        assert len(kept) <= len(proposals) or any(adjustment.kind == "cut" for adjustment in adjustments)


# -- over a cap by itself ----------------------------------------------------------------------------------------------


def test_a_group_that_is_over_a_cap_is_dropped_and_the_rest_is_kept() -> None:
    build = Builder()
    values = [build.input("x", 4)]
    for i in range(5):
        values.append(build.op(f"n{i}", 4, values[-1]))
    scope = build.scope(values[-1])
    kept, rejections, adjustments = apply(scope, Limits(max_nodes=2), [values[2:5]])
    assert [names(piece.nodes) for piece in kept] == ["n0", "n4"]
    said, reason = "5 operators, max_nodes=2", "3 operators, max_nodes=2 (a group that must stay together)"
    assert rejections == [Rejection("", f"n{i}", "aten.relu.default", reason, "me", "over_capacity") for i in (1, 2, 3)]
    assert adjustments == [
        Adjustment("", "dropped", ("n1", "n2", "n3"), reason, "me"),
        Adjustment("", "cut", ("n0", "n1", "n2", "n3", "n4"), f"{said}: cut into 2", "me"),
    ]


def test_an_operator_with_too_large_a_weight_is_dropped() -> None:
    build = Builder()
    a = build.op("a", 4, build.input("x", 4), build.constant("small", 10))
    b = build.op("b", 4, build.input("y", 4), build.constant("large", 5000))
    kept, rejections, adjustments = apply(build.scope(a, b, path=("then",)), Limits(max_weight_bytes=4096))
    assert [names(piece.nodes) for piece in kept] == ["a"], "what does not depend on it stays one partition"
    reason = "5,000 bytes of weights, max_weight_bytes=4,096 (one operator)"
    assert rejections == [Rejection("", "then.b", "aten.cat.default", reason, "me", "over_capacity")]
    assert adjustments == [Adjustment("", "dropped", ("then.b",), reason, "me")]


# -- too small, too many -----------------------------------------------------------------------------------------------


def islands(*sizes: int) -> tuple[GraphScope, list[Proposal]]:
    """Make partitions of so many operators each, with a host operator behind each."""
    build = Builder()
    value = build.input("x", 10)
    for i, size in enumerate(sizes):
        for j in range(size):
            value = build.op(f"p{i}_{j}", 10, value)
        value = build.op(f"host{i}", 10, value)
    scope = build.scope(value)
    return scope, propose_partitions(scope, lambda node: not node.name.startswith("host"))


def first_names(kept: Sequence[Proposal]) -> str:
    return names([proposal.nodes[0] for proposal in kept])


def test_too_few_operators_are_dropped() -> None:
    scope, proposals = islands(2, 6, 4)
    kept, rejections, adjustments = limits.apply(proposals, Limits(min_nodes=5), scope, by="me")
    assert first_names(kept) == "p1_0"
    assert adjustments == [
        Adjustment("", "dropped", ("p0_0", "p0_1"), "2 operators, min_nodes=5", "me"),
        Adjustment("", "dropped", ("p2_0", "p2_1", "p2_2", "p2_3"), "4 operators, min_nodes=5", "me"),
    ]
    reason = "its partition was dropped: 2 operators, min_nodes=5"
    assert rejections[0] == Rejection("", "p0_0", "aten.relu.default", reason, "me", "dropped")
    assert len(rejections) == 6


def test_too_little_work_is_dropped() -> None:
    scope, proposals = islands(1, 3)
    kept, _, adjustments = limits.apply(proposals, Limits(min_flops=1000), scope, by="me")
    assert kept == []
    work = [sum(measures.flops(node) for node in proposal.nodes) for proposal in proposals]
    assert work == [10, 30]
    assert [a.reason for a in adjustments] == [f"{flops} floating-point operations, min_flops=1,000" for flops in work]
    assert first_names(limits.apply(proposals, Limits(min_flops=30), scope, by="me")[0]) == "p1_0"


def test_of_too_many_those_with_the_most_work_are_kept() -> None:
    scope, proposals = islands(2, 5, 3, 5, 2)
    kept, rejections, adjustments = limits.apply(proposals, Limits(max_partitions=3), scope, by="me")
    assert first_names(kept) == "p1_0 p2_0 p3_0"
    assert [a.reason for a in adjustments] == [
        f"number {rank} of 5 partitions by work, max_partitions=3: 20 floating-point operations, 2 operators"
        for rank in (4, 5)
    ]
    assert {rejection.code for rejection in rejections} == {"dropped"}
    assert first_names(limits.apply(proposals, Limits(max_partitions=1), scope, by="me")[0]) == "p1_0"
    assert limits.apply(proposals, Limits(max_partitions=5), scope, by="me") == (proposals, [], [])


# -- a real program ----------------------------------------------------------------------------------------------------


def test_weights_of_a_real_program_are_cut() -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in pairwise((256, 256, 8, 256, 256))))
    (scope,) = scopes(edge_program(layers, (torch.randn(4, 256),)))
    held = sum(parameter.numel() * 4 for parameter in layers.parameters())
    kept, rejections, adjustments = apply(scope, Limits(max_weight_bytes=300_000))
    require_valid(scope, kept)
    assert rejections == []
    assert [weight_bytes(piece.nodes, scope) for piece in kept] == [280_608, 263_168]
    assert adjustments[0].reason == (f"{held:,} bytes of weights, max_weight_bytes=300,000: cut into 2")


def test_a_weight_counts_behind_what_is_computed_of_it() -> None:
    """A linear is a transposed weight and a product on the way to Edge dialect; the product holds the weight, too."""
    program = torch.export.export(torch.nn.Linear(600, 600).eval(), (torch.ones(2, 600),))
    partitioner = SupportPartitioner({"echo": ops("aten.addmm")}, limits=Limits(max_weight_bytes=1_000_000))
    (_, product) = exir_lowering.plan(program, partitioner).methods[0].host
    assert product.operator == "aten.addmm.default"
    assert product.reason == "1,442,400 bytes of weights, max_weight_bytes=1,000,000 (one operator)"


def test_a_part_of_a_weight_counts_as_what_it_is() -> None:
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(1000, 512))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table[:4]

    program = torch.export.export(Table(), (torch.ones(4, 512),))
    partitioner = SupportPartitioner({"echo": ops("aten.add")}, limits=Limits(max_weight_bytes=1_000_000))
    assert len(exir_lowering.plan(program, partitioner).methods[0].partitions) == 1
