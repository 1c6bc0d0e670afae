"""The proposal algorithm: acyclic, the fewest partitions, linear, and the same as before for who calls torch.fx's."""

from __future__ import annotations

import random

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir.backend.canonical_partitioners.group_partitioner import GroupBasedPartitioner
from lowering_support import edge_program
from random_dags import chain, contracts, label, minimum, operators, random_graph, seeds, upstream_partitions
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra import partitioner as fx
from torch.fx.passes.operator_support import create_op_support

import exir_lowering
from exir_lowering import InputError, PartitionerContractError, compat, graphs
from exir_lowering.partitioners import convex_proposals, ops, propose_partitions


def is_a(node: Node) -> bool:
    return label(node) == "A"


@pytest.mark.parametrize("part", range(10))
def test_on_random_graphs_never_more_than_torch_fx_and_acyclic(part: int) -> None:
    """1,000 graphs of up to 300 nodes in all."""
    for seed in range(100 * part, 100 * (part + 1)):
        rng = random.Random(seed)
        module = random_graph(rng, rng.choice([10, 30, 60, 120, 300]) if seed % 10 == 0 else rng.randint(2, 60))
        proposals = propose_partitions(module, is_a)
        assert contracts(module, [p.nodes for p in proposals]), seed
        assert len(proposals) == alternations(module) <= len(upstream_partitions(module)), seed
        claimed = {node for p in proposals for node in p.nodes}
        assert {node for node in operators(module) if is_a(node)} == claimed & set(operators(module)), seed


def alternations(module: GraphModule) -> int:
    """Return the most segments of A on a path: no acyclic contraction has fewer partitions."""
    most, taken = {}, dict[Node, bool]()
    for node in module.graph.nodes:
        taken[node] = is_a(node.args[0] if graphs.is_getitem(node) else node)
        before = [most[source] + (taken[node] and not taken[source]) for source in node.all_input_nodes]
        most[node] = max(before, default=int(taken[node]))
    return max(most.values())


def test_on_small_graphs_the_minimum() -> None:
    """One backend: the gap to brute force is 0 on every graph."""
    for rng in seeds(150):
        module = random_graph(rng, rng.randint(1, 8))
        labels = {node: "A" for node in operators(module) if is_a(node)}
        assert len(propose_partitions(module, is_a)) == minimum(module, labels)


def test_several_backends_against_brute_force() -> None:
    """Several backends: an approximation; at most one partition too many here, and that seldom."""
    gaps = []
    for rng in seeds(150):
        module = random_graph(rng, rng.randint(2, 8), ("A", "B", None))
        labels = {node: label(node) for node in operators(module) if label(node) is not None}
        proposals = propose_partitions(module, {"A": lambda n: label(n) == "A", "B": lambda n: label(n) == "B"})
        assert contracts(module, [p.nodes for p in proposals])
        assert all(labels[node] == p.backend for p in proposals for node in p.nodes if node in labels)
        gaps.append(len(proposals) - minimum(module, labels))
    assert min(gaps) == 0 and max(gaps) <= 1 and sum(gaps) <= 3, sum(gaps)


def test_parts_that_share_no_edge_are_kept_apart_when_asked() -> None:
    for rng in seeds(150):
        module = random_graph(rng, rng.randint(2, 80))
        proposals = propose_partitions(module, is_a, keep_apart=True)
        assert contracts(module, [p.nodes for p in proposals])
        for proposal in proposals:
            assert _is_connected(proposal.nodes)
        together = propose_partitions(module, is_a)
        assert {node for p in proposals for node in p.nodes} == {node for p in together for node in p.nodes}


def _is_connected(nodes: tuple[Node, ...]) -> bool:
    inside, reached, stack = set(nodes), {nodes[0]}, [nodes[0]]
    while stack:
        node = stack.pop()
        for other in (*node.users, *node.all_input_nodes):
            if other in inside and other not in reached:
                reached.add(other)
                stack.append(other)
    return reached == inside


def test_groups_stay_together_and_can_be_contracted() -> None:
    for rng in seeds(150):
        module = random_graph(rng, rng.randint(4, 60))
        claimed = [node for node in operators(module) if is_a(node)]
        groups = [rng.sample(claimed, min(len(claimed), 2)) for _ in range(2)]
        try:
            proposals = propose_partitions(module, is_a, groups=groups)
        except InputError as error:
            assert "->" in str(error)
            assert not all(_convex(module, group) for group in groups) or len(groups) > 1
            continue
        assert contracts(module, [p.nodes for p in proposals])
        for group in groups:
            homes = [i for i, p in enumerate(proposals) for node in group if node in p.nodes]
            assert len(set(homes)) == 1


def _convex(module: GraphModule, group: list[Node]) -> bool:
    return contracts(module, [group])


def _diamond() -> tuple[GraphModule, dict[str, Node]]:
    """Return a -> host -> b, and a -> b."""
    graph = Graph()
    x = graph.placeholder("x")
    a = graph.create_node("call_function", torch.relu, (x,), name="a")
    host = graph.create_node("call_function", torch.sin, (a,), name="host")
    b = graph.create_node("call_function", torch.add, (a, host), name="b")
    graph.output(b)
    return GraphModule({}, graph), {"a": a, "host": host, "b": b}


def test_a_group_that_cannot_be_convex_is_refused_with_the_path() -> None:
    module, nodes = _diamond()
    with pytest.raises(InputError, match=r"a -> host -> b") as error:
        propose_partitions(module, lambda n: n.name != "host", groups=[[nodes["a"], nodes["b"]]])
    assert "Node host on it is not supported" in str(error.value)
    (proposal,) = propose_partitions(module, lambda n: True, groups=[[nodes["a"], nodes["b"]]])
    assert [node.name for node in proposal.nodes] == ["a", "host", "b"]


def test_a_group_with_a_node_that_is_not_supported_stays_whole_on_the_host() -> None:
    module, nodes = _diamond()
    proposals = propose_partitions(module, lambda n: n.name != "host", groups=[[nodes["a"], nodes["host"]]])
    assert [[node.name for node in p.nodes] for p in proposals] == [["b"]]


def test_a_support_that_raises_is_named_with_the_node() -> None:
    module, _ = _diamond()

    def broken(node: Node) -> bool:
        raise KeyError("alpha")

    with pytest.raises(PartitionerContractError, match=r"broken.*raised KeyError for node a \(relu") as error:
        propose_partitions(module, broken)
    assert isinstance(error.value.__cause__, KeyError)


def test_degenerate_graphs() -> None:
    graph = Graph()
    graph.output(graph.placeholder("x"))
    assert propose_partitions(GraphModule({}, graph), lambda n: True) == []
    module, _ = _diamond()
    assert propose_partitions(module, lambda n: False) == []


def test_getitem_follows_its_producer_and_constants_are_left() -> None:
    """A net full of batch norm is one partition for a backend that never mentions getitem."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.BatchNorm2d(4) for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    program = edge_program(Net(), (torch.randn(1, 4, 8, 8),))
    names = {graphs.operator_name(n) for n in program.graph.nodes if graphs.is_operator(n)}
    assert any("batch_norm" in name for name in names) and any(graphs.is_getitem(n) for n in program.graph.nodes)
    (proposal,) = propose_partitions(program.graph_module, ops(*names))
    assert {n.op for n in proposal.nodes} == {"call_function"}
    assert [n for n in proposal.nodes if graphs.is_getitem(n)]


def test_work_grows_linearly() -> None:
    """Counted, not timed: how often the support is asked, and how often sizes are looked at."""
    for length in (100, 1000):
        asked = []
        module = chain(length, 2)
        proposals = propose_partitions(module, lambda n, asked=asked: (asked.append(n), is_a(n))[1])
        assert len(asked) == length and len(proposals) == length // 2


# -- as torch.fx's partitioner -----------------------------------------------------------------------------------------


def test_torch_fxs_partitioner_proposes_with_it() -> None:
    support = create_op_support(lambda modules, node: is_a(node))
    for rng in seeds(40):
        module = random_graph(rng, 40)
        for alone in (True, False):
            with convex_proposals():
                ours = fx.CapabilityBasedPartitioner(module, support, alone).propose_partitions()
            theirs = fx.CapabilityBasedPartitioner(module, support, alone).propose_partitions()
            assert all(isinstance(partition, fx.Partition) for partition in ours)
            if alone:
                assert len(ours) <= len(theirs)
            else:
                assert all(sum(n in set(operators(module)) for n in p.nodes) > 1 for p in ours)
            assert contracts(module, [list(p.nodes) for p in ours])


def test_torch_fxs_partitioner_fuses_with_it() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.relu, (x,))
    b = graph.call_function(torch.sin, (a,))
    c = graph.call_function(torch.add, (a, b))
    graph.output(c)
    module = GraphModule({}, graph)
    support = create_op_support(lambda modules, node: node.target in (torch.relu, torch.add))
    with convex_proposals():
        fused = fx.CapabilityBasedPartitioner(module, support, True).partition_and_fuse()
    value = torch.randn(4)
    assert torch.equal(fused(value), torch.relu(value) + torch.sin(torch.relu(value)))


class _Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1)
        return torch.erf(weights) @ self.v(x)


def test_executorch_partitioners_use_it_when_asked() -> None:
    program = torch.export.export(_Attention().eval(), (torch.randn(1, 4, 8),))
    before = exir_lowering.plan(program, XnnpackPartitioner()).methods[0]
    originals = (fx.CapabilityBasedPartitioner.propose_partitions, GroupBasedPartitioner.propose_partitions)
    with convex_proposals():
        assert GroupBasedPartitioner.propose_partitions is not originals[1]
        after = exir_lowering.plan(program, XnnpackPartitioner()).methods[0]
    assert originals == (fx.CapabilityBasedPartitioner.propose_partitions, GroupBasedPartitioner.propose_partitions)
    assert {n for p in before.partitions for n in p.nodes} == {n for p in after.partitions for n in p.nodes}
    assert len(after.partitions) <= len(before.partitions)


def test_patch_executorch_uses_it_when_asked_and_the_file_runs() -> None:
    from executorch.exir import to_edge_transform_and_lower

    model = _Attention().eval()
    value = torch.randn(1, 4, 8)
    with compat.patch_executorch(convex_proposals=True):
        manager = to_edge_transform_and_lower(torch.export.export(model, (value,)), partitioner=[XnnpackPartitioner()])
    (got,) = exir_lowering.load(manager.to_executorch().buffer).run("forward", value)
    torch.testing.assert_close(got, model(value), atol=1e-4, rtol=1e-4)


def test_a_group_of_executorchs_that_is_not_convex_is_cut_and_not_refused() -> None:
    module, nodes = _diamond()
    support = create_op_support(lambda modules, node: node.name in ("a", "b"))
    with convex_proposals():
        partitions = GroupBasedPartitioner(
            module, support, allows_single_node_partition=True, node_groups=[[nodes["a"], nodes["b"]]]
        ).propose_partitions()
    assert sorted([n.name for n in p.nodes] for p in partitions) == [["a"], ["b"]]
