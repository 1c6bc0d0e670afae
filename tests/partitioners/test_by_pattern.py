"""Patterns: what matches and what must not, who wins an overlap, and what a partitioner makes of the matches."""

from __future__ import annotations

import operator
import os
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import quantized_models
import torch
import torch.nn.functional as F
from executorch.exir.dialects._ops import ops as exir_ops
from hypothesis import given, settings, strategies as st
from lowering_support import delegates, edge_program
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

import exir_lowering
from exir_lowering import CompileSpec, InputError, PartitionerContractError, graphs
from exir_lowering.graphs import quotient
from exir_lowering.partitioners import (
    ANY,
    Constant,
    Match,
    Pattern,
    PatternPartitioner,
    PatternSupport,
    one_of,
)
from exir_lowering.partitioners.algorithms.convex import contract, list_computing, propose_partitions
from exir_lowering.partitioners.supports.patterns import find
from exir_lowering.partitioners.supports.predicates import dtypes, ops
from exir_lowering.partitioners.supports.support import GraphScope, scopes

aten = torch.ops.aten
edge = exir_ops.edge.aten
X = torch.linspace(-1, 1, 12).reshape(3, 4) + 0.25


def swish(x: Any) -> Any:
    return aten.mul.Tensor(x, aten.sigmoid.default(x))


def sigmoid_tanh(x: Any) -> Any:
    return aten.tanh.default(aten.sigmoid.default(x))


def graph_of(build: Callable[..., Any], inputs: int = 1) -> GraphModule:
    """Make a graph of Edge operators without exporting anything: the function calls `g` on nodes."""
    graph = Graph()
    nodes = [graph.placeholder(name) for name in "xyzuvw"[:inputs]]
    graph.output(build(graph.call_function, *nodes))
    return GraphModule({}, graph)


def matches(module: GraphModule | ExportedProgram, *patterns: Pattern) -> list[list[str]]:
    """Return the names of the nodes of each match in the top graph."""
    scope = next(scopes(module)) if isinstance(module, ExportedProgram) else GraphScope(module)
    return [[node.name for node in group] for group in PatternSupport(*patterns).groups(scope)]


def reasons(module: GraphModule, *patterns: Pattern) -> dict[str, str]:
    check = PatternSupport(*patterns).bind(GraphScope(module))
    answers = {node.name: check(node) for node in list_computing(module)}
    assert all(no is None or no.code == "pattern" for no in answers.values())
    return {name: no.text for name, no in answers.items() if no is not None}


# -- what matches ------------------------------------------------------------------------------------------------------


def test_commuted_operands_match_and_other_operands_do_not() -> None:
    def build(g: Any, x: Node, y: Node) -> Any:
        right, left = g(edge.sigmoid.default, (x,)), g(edge.sigmoid.default, (x,))
        other = g(edge.sigmoid.default, (x,))
        return (
            g(edge.mul.Tensor, (x, right)),
            g(edge.mul.Tensor, (left, x)),
            g(edge.mul.Tensor, (other, y)),
        )

    found = matches(graph_of(build, 2), Pattern(swish))
    assert found == [["aten_sigmoid_default", "aten_mul_tensor"], ["aten_sigmoid_default_1", "aten_mul_tensor_1"]]


def test_sub_does_not_commute_and_add_only_with_alpha_1() -> None:
    def sub(x: Any) -> Any:
        return aten.sub.Tensor(x, aten.relu.default(x))

    def add(x: Any) -> Any:
        return aten.add.Tensor(x, aten.relu.default(x), alpha=ANY)

    def build(g: Any, x: Node) -> Any:
        r = [g(edge.relu.default, (x,)) for _ in range(5)]
        return (
            g(edge.sub.Tensor, (r[0], x)),
            g(edge.sub.Tensor, (x, r[1])),
            g(edge.add.Tensor, (r[2], x)),
            g(edge.add.Tensor, (r[3], x), {"alpha": 2}),
            g(edge.add.Tensor, (x, r[4]), {"alpha": 2}),
        )

    found = matches(graph_of(build), Pattern(sub), Pattern(add))
    assert [group[-1] for group in found] == ["aten_sub_tensor_1", "aten_add_tensor", "aten_add_tensor_2"]


def test_a_parameter_that_is_used_twice_is_one_node() -> None:
    def square(x: Any) -> Any:
        return aten.mul.Tensor(x, x)

    def build(g: Any, x: Node, y: Node) -> Any:
        return g(edge.mul.Tensor, (x, y)), g(edge.mul.Tensor, (y, y))

    assert matches(graph_of(build, 2), Pattern(square)) == [["aten_mul_tensor_1"]]


def test_two_equal_operators_of_a_pattern_are_two_nodes() -> None:
    def twice(x: Any) -> Any:
        return aten.mul.Tensor(aten.sigmoid.default(x), aten.sigmoid.default(x))

    def build(g: Any, x: Node) -> Any:
        one, two, three = (g(edge.sigmoid.default, (x,)) for _ in range(3))
        return g(edge.mul.Tensor, (one, one)), g(edge.mul.Tensor, (two, three))

    assert [group[-1] for group in matches(graph_of(build), Pattern(twice))] == ["aten_mul_tensor_1"]


def test_wildcards_match_nodes_numbers_lists_and_nothing() -> None:
    def clamp(x: Any) -> Any:
        return aten.clamp.default(x, ANY, ANY)

    def mean(x: Any, axes: Any = ANY) -> Any:
        return aten.mean.dim(x, axes, ANY)

    def build(g: Any, x: Node) -> Any:
        return (
            g(edge.clamp.default, (x, 0)),
            g(edge.clamp.default, (x,), {"max": 1.5}),
            g(edge.mean.dim, (x, [0, 1], True)),
            g(edge.mean.dim, (x, None)),
        )

    assert len(matches(graph_of(build), Pattern(clamp), Pattern(mean))) == 4


def test_one_of_matches_either_operator() -> None:
    def activated(x: Any, y: Any) -> Any:
        return one_of(aten.relu.default, aten.gelu.default)(aten.add.Tensor(x, y))

    def build(g: Any, x: Node, y: Node) -> Any:
        sums = [g(edge.add.Tensor, (x, y)) for _ in range(3)]
        return (
            g(edge.relu.default, (sums[0],)),
            g(edge.tanh.default, (sums[1],)),
            g(edge.gelu.default, (sums[2],), {"approximate": "none"}),
        )

    found = matches(graph_of(build, 2), Pattern(activated))
    assert [group[-1] for group in found] == ["aten_relu_default", "aten_gelu_default"]


def test_lists_match_item_by_item() -> None:
    def joined(x: Any, y: Any) -> Any:
        return aten.cat.default([aten.relu.default(x), y], 1)

    def build(g: Any, x: Node, y: Node) -> Any:
        relu = [g(edge.relu.default, (x,)) for _ in range(3)]
        return (
            g(edge.cat.default, ([relu[0], y], 1)),
            g(edge.cat.default, ([y, relu[1]], 1)),
            g(edge.cat.default, ([relu[2], y, y], 1)),
        )

    assert matches(graph_of(build, 2), Pattern(joined)) == [["aten_relu_default", "aten_cat_default"]]


def test_several_results_with_getitem() -> None:
    def normed(x: Any, weight: Any) -> Any:
        return aten.relu.default(aten.native_layer_norm.default(x, ANY, weight, None, 1e-5)[0])

    def build(g: Any, x: Node, y: Node) -> Any:
        norms = [g(edge.native_layer_norm.default, (x, [4], y, None, eps)) for eps in (1e-5, 1e-5, 1e-3)]
        items = [g(operator.getitem, (norm, i)) for norm, i in zip(norms, (0, 1, 0), strict=True)]
        return tuple(g(edge.relu.default, (item,)) for item in items)

    found = matches(graph_of(build, 2), Pattern(normed))
    assert found == [["aten_native_layer_norm_default", "getitem", "aten_relu_default"]]


# -- what must not be delegated ----------------------------------------------------------------------------------------


def test_escaping_values_refuse_the_match() -> None:
    def build(g: Any, x: Node) -> Any:
        inner = g(edge.sigmoid.default, (x,))
        return g(edge.mul.Tensor, (x, inner)), g(edge.relu.default, (inner,))

    module = graph_of(build)
    assert matches(module, Pattern(swish)) == []
    told = reasons(module, Pattern(swish))
    assert (
        "aten_sigmoid_default, which is not among its results, is used outside of it by aten_relu_default"
        in (told["aten_mul_tensor"])
    )
    assert told["aten_relu_default"] == "it is in no match of swish"


def test_a_value_that_is_a_result_may_be_used_outside() -> None:
    def both(x: Any) -> Any:
        inner = aten.sigmoid.default(x)
        return inner, aten.mul.Tensor(x, inner)

    def build(g: Any, x: Node) -> Any:
        inner = g(edge.sigmoid.default, (x,))
        return g(edge.mul.Tensor, (x, inner)), g(edge.relu.default, (inner,))

    assert matches(graph_of(build), Pattern(both)) == [["aten_sigmoid_default", "aten_mul_tensor"]]


def test_two_matches_that_feed_each_other_are_not_both_taken() -> None:
    def crossed(x: Any, y: Any) -> Any:
        return aten.sigmoid.default(aten.relu.default(x)), aten.tanh.default(aten.mul.Tensor(x, y))

    def build(g: Any, x: Node, y: Node, z: Node) -> Any:
        first = g(edge.sigmoid.default, (g(edge.relu.default, (x,)),))
        second = g(edge.sigmoid.default, (g(edge.relu.default, (y,)),))
        # Each match needs, for its second result, the first result of the other: alone both are convex.
        one = g(edge.tanh.default, (g(edge.mul.Tensor, (x, g(edge.neg.default, (second,)))),))
        two = g(edge.tanh.default, (g(edge.mul.Tensor, (y, g(edge.neg.default, (first,)))),))
        return one, two

    module = graph_of(build, 3)
    found = matches(module, Pattern(crossed))
    assert [len(group) for group in found] == [4]
    lost = {name for name, why in reasons(module, Pattern(crossed)).items() if "feed each other both ways" in why}
    assert len(lost) == 4
    proposals = propose_partitions(module, PatternSupport(Pattern(crossed)) | ops("aten.neg.default"))
    assert any(set(found[0]) <= {node.name for node in proposal.nodes} for proposal in proposals)


# -- overlaps ----------------------------------------------------------------------------------------------------------


def chain(*names: str) -> GraphModule:
    def build(g: Any, x: Node) -> Any:
        for name in names:
            x = g(getattr(edge, name).default, (x,))
        return x

    return graph_of(build)


def relu_tanh(x: Any) -> Any:
    return aten.tanh.default(aten.relu.default(x))


def tanh_neg(x: Any) -> Any:
    return aten.neg.default(aten.tanh.default(x))


def relu_tanh_neg(x: Any) -> Any:
    return aten.neg.default(aten.tanh.default(aten.relu.default(x)))


def test_overlaps_go_to_priority_then_size_then_graph_order() -> None:
    module = chain("relu", "tanh", "neg")
    first, second, whole = Pattern(relu_tanh), Pattern(tanh_neg), Pattern(relu_tanh_neg)
    assert matches(module, second, first) == [["aten_relu_default", "aten_tanh_default"]]
    assert matches(module, first, second, whole) == [["aten_relu_default", "aten_tanh_default", "aten_neg_default"]]
    prior = Pattern(tanh_neg, priority=1)
    assert matches(module, first, prior, whole) == [["aten_tanh_default", "aten_neg_default"]]
    early = Pattern(relu_tanh, priority=1)
    assert reasons(module, early, second) == {
        "aten_neg_default": "pattern tanh_neg did not match: node aten_tanh_default is in a match of pattern relu_tanh"
    }


def test_equal_patterns_take_disjoint_nodes_of_a_chain() -> None:
    def twice(x: Any) -> Any:
        return aten.relu.default(aten.relu.default(x))

    found = matches(chain(*["relu"] * 5), Pattern(twice))
    assert found == [["aten_relu_default", "aten_relu_default_1"], ["aten_relu_default_2", "aten_relu_default_3"]]


def comparisons(module: GraphModule, pattern: Pattern, expected: int) -> int:
    matching = find(GraphScope(module), [pattern])
    assert len(matching.found) == expected
    return matching.comparisons


def test_a_long_chain_takes_comparisons_in_proportion() -> None:
    def swishes(count: int) -> GraphModule:
        def build(g: Any, x: Node) -> Any:
            for _ in range(count):
                x = g(edge.mul.Tensor, (g(edge.sigmoid.default, (x,)), x))
            return x

        return graph_of(build)

    few, many = (comparisons(swishes(count), Pattern(swish), count) for count in (50, 500))
    assert many <= 10 * few + 100


# -- checks ------------------------------------------------------------------------------------------------------------


def test_a_check_sees_the_match_and_may_refuse_it() -> None:
    seen: list[Match] = []

    def first_only(match: Match) -> bool:
        seen.append(match)
        return len(seen) == 1

    def build(g: Any, x: Node) -> Any:
        x = g(edge.mul.Tensor, (x, g(edge.sigmoid.default, (x,))))
        return g(edge.mul.Tensor, (x, g(edge.sigmoid.default, (x,))))

    module = graph_of(build)
    pattern = Pattern(swish, check=first_only)
    support = PatternSupport(pattern)
    check, groups = support.bind(GraphScope(module)), support.groups(GraphScope(module))
    assert [[node.name for node in group] for group in groups] == [["aten_sigmoid_default", "aten_mul_tensor"]]
    assert len(seen) == 2, "bind and groups match once"
    nodes = {node.name: node for node in module.graph.nodes}
    assert seen[0].pattern is pattern
    assert seen[0].nodes == (nodes["aten_sigmoid_default"], nodes["aten_mul_tensor"])
    assert seen[0].inputs == {"x": nodes["x"]} and seen[1].inputs == {"x": nodes["aten_mul_tensor"]}
    assert seen[0].outputs == (nodes["aten_mul_tensor"],)
    refusal = check(nodes["aten_mul_tensor_1"])
    assert refusal is not None and "its check refused it" in refusal.text


def test_a_check_that_raises_is_told_with_pattern_and_node() -> None:
    def broken(match: Match) -> bool:
        raise KeyError("weight")

    pattern = Pattern(relu_tanh, name="activation", check=broken)
    with pytest.raises(PartitionerContractError, match=r"pattern activation raised KeyError.*aten_tanh_default") as e:
        propose_partitions(chain("relu", "tanh"), PatternSupport(pattern))
    assert e.value.violation == "raised"


# -- patterns in any PyTorch -------------------------------------------------------------------------------------------


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 6), torch.nn.Linear(6, 6)
        self.norm = torch.nn.LayerNorm(6)

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> Any:
        y = F.gelu(self.first(x))
        y = F.linear(y, w, self.second.bias)  # a computed weight
        y = self.norm(y) * 2.0
        y = torch.sigmoid(y) * y
        return y.reshape(-1).softmax(-1), y.expand(2, 3, 6) * 3.0, y.softmax(0)


@pytest.fixture(scope="module")
def layers() -> ExportedProgram:
    return edge_program(Layers(), (X, torch.randn(6, 6)))


def linear(x: Any, w: Constant, b: Constant) -> Any:
    return F.linear(x, w, b)


def any_linear(x: Any, w: Any, b: Any) -> Any:
    return F.linear(x, w, b)


def test_constant_parameters_do_not_match_computed_weights(layers: ExportedProgram) -> None:
    example = (torch.randn(2, 5), torch.randn(7, 5), torch.randn(7))
    assert matches(layers, Pattern(linear, example)) == [["aten_permute_copy_default", "aten_addmm_default"]]
    assert len(matches(layers, Pattern(any_linear, example))) == 2

    def product(x: Any, w: Any = Constant) -> Any:
        return aten.addmm.default(ANY, x, aten.permute_copy.default(w, [1, 0]))

    assert len(matches(layers, Pattern(product))) == 1


@pytest.mark.parametrize(
    ("function", "shape", "expected"),
    [
        (lambda x: F.gelu(x), (2, 9), ["aten_gelu_default"]),
        (lambda x: x * torch.sigmoid(x), (7,), ["aten_sigmoid_default", "aten_mul_tensor_1"]),
        (lambda x: x.reshape(-1).softmax(-1), (5, 9), ["aten_view_copy_default", "aten__softmax_default"]),
        (lambda x: x.softmax(0), (5, 9), ["aten__softmax_default_1"]),
        (lambda x: x.expand(4, 5, 9) * 3.0, (5, 9), ["aten_expand_copy_default", "aten_mul_tensor_2"]),
        (lambda x: x.expand(4, 5, 9) * 2.0, (5, 9), None),
        (lambda x: F.layer_norm(x, (9,)) * 2.0, (5, 9), None),
    ],
    ids=["gelu", "swish", "flat softmax", "dim", "constant", "other constant", "no weight"],
)
def test_any_torch_code_matches_after_decomposition(
    layers: ExportedProgram, function: Any, shape: Sequence[int], expected: list[str] | None
) -> None:
    found = matches(layers, Pattern(function, (torch.randn(*shape),)))
    assert found == ([expected] if expected else [])


# -- patterns that are none --------------------------------------------------------------------------------------------


def two_pieces(x: Any, y: Any) -> Any:
    return aten.relu.default(x), aten.tanh.default(y)


BAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "no operator": ((lambda x: 3,), "calls no operator"),
    "an input returned": ((lambda x: (aten.relu.default(x), x),), "returns x.*Return the results of operators only"),
    "star arguments": ((lambda *x: aten.relu.default(x[0]),), r"parameter '\*x'.*a parameter of its own"),
    "two pieces": ((two_pieces,), "not connected.*two patterns"),
    "a torch function": ((lambda x: torch.relu(x),), "not an operator overload.*give example_inputs"),
    "a method": ((lambda x: x.relu(),), "method relu.*give example_inputs"),
    "an operator without overload": ((lambda x: aten.relu(x),), r"for example torch.ops.aten.relu.default"),
    "an index": ((lambda x: aten.relu.default(x)[0],), "indexes a tensor.*give example_inputs"),
    "a result that is lost": ((lambda x: (aten.relu.default(x), aten.tanh.default(x))[0],), "neither used nor"),
    "a parameter that is not used": ((lambda x, y: aten.relu.default(x),), "parameter y is not used"),
    "no signature": ((F.gelu, (X,)), "no signature.*Wrap it"),
    "other examples": ((lambda x: x.relu(), (3,)), r"\['int'\]; expected a tensor for each of the parameters x"),
    "a tensor of its own": ((lambda x: x + torch.tensor([1.0, 2, 3, 4]), (X,)), "parameter, annotated Constant"),
    "a write": ((lambda x: x.add_(1), (X,)), "writes to an input"),
    "one_of with examples": ((lambda x: one_of(aten.relu.default)(x), (X,)), "without example_inputs"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_pattern_is_refused(name: str) -> None:
    arguments, message = BAD[name]
    with pytest.raises(InputError, match=re.compile(message, re.DOTALL)):
        Pattern(*arguments)


# -- random graphs -----------------------------------------------------------------------------------------------------


def random_graph(seed: int, size: int) -> GraphModule:
    rng = random.Random(seed)
    graph = Graph()
    pool = [graph.placeholder("x"), graph.placeholder("y")]
    for _ in range(size):
        name, count = rng.choice([("mul", 2), ("add", 2), ("sigmoid", 1), ("tanh", 1)])
        overload = getattr(edge, name)
        picked = tuple(rng.choice(pool[-6:]) for _ in range(count))
        pool.append(graph.call_function(overload.Tensor if count == 2 else overload.default, picked))
    graph.output(tuple(pool[-2:]))
    return GraphModule({}, graph)


def is_swish(node: Any) -> set[Node] | None:
    """Tell by hand whether a node ends a match of `swish`."""
    if graphs.operator_name(node) == "aten.mul.Tensor":
        for inner, outer in (node.args, reversed(node.args)):
            is_sigmoid = inner.op == "call_function" and graphs.operator_name(inner) == "aten.sigmoid.default"
            if is_sigmoid and inner.args[0] is outer and list(inner.users) == [node]:
                return {inner, node}
    return None


@settings(max_examples=int(os.environ.get("EXIR_LOWERING_EXAMPLES", "60")), deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 40))
def test_every_match_is_found_and_is_one(seed: int, size: int) -> None:
    module = random_graph(seed, size)
    expected = [match for node in module.graph.nodes if (match := is_swish(node))]  # these never overlap
    assert list(map(set, PatternSupport(Pattern(swish)).groups(GraphScope(module)))) == expected


def siblings(x: Any, y: Any) -> Any:
    return aten.tanh.default(x), aten.mul.Tensor(x, y)


def top_and_sum(x: Any, y: Any, z: Any) -> Any:
    top = aten.add.Tensor(x, y)
    return top, aten.mul.Tensor(top, z)


RANDOM = [Pattern(siblings), Pattern(top_and_sum, priority=1), Pattern(sigmoid_tanh), Pattern(swish)]


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 60), everything=st.booleans())
def test_matched_nodes_are_never_split(seed: int, size: int, everything: bool) -> None:
    module = random_graph(seed, size)
    support = PatternSupport(*RANDOM)
    groups = support.groups(GraphScope(module))
    assert len({node for group in groups for node in group}) == sum(map(len, groups))
    nodes = list_computing(module)
    _, cycle = quotient.order(nodes, {node: str(i) for i, group in enumerate(groups) for node in group})
    assert cycle is None, "each match can be a partition of its own"
    of = {node: i for i, group in enumerate(groups) for node in group}
    assert all(of[node] <= of.get(user, len(groups)) for node in of for user in node.users), "in topological order"
    taken = nodes if everything else [node for group in groups for node in group]
    proposals = contract(nodes, dict.fromkeys(taken, ""), groups=groups)
    for group in groups:
        assert sum(not set(group).isdisjoint(proposal.nodes) for proposal in proposals) == 1
    tags = {node: str(i) for i, proposal in enumerate(proposals) for node in proposal.nodes}
    assert quotient.order(nodes, tags)[1] is None


# -- the partitioner ---------------------------------------------------------------------------------------------------


class InCond(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.sigmoid(x) + 1.0
        return torch.cond(y.sum() > 0, lambda v: F.silu(self.linear(v)) * 2.0, lambda v: v - 1.0, (y,))


def torch_swish(x: Any) -> Any:
    return x * torch.sigmoid(x)


def doubled(x: Any) -> Any:
    return x * 2.0


def parts(program: ExportedProgram) -> list[list[str]]:
    """Return the operators of each delegate."""
    return [
        [graphs.operator_name(node) for node in list_computing(delegate.original_module.graph_module)]
        for delegate in delegates(program)
    ]


def test_lowered_matches_are_delegates_and_equal_to_eager() -> None:
    model = InCond().eval()
    patterns = [
        Pattern(torch_swish, (X,)),
        Pattern(linear, (X, torch.randn(4, 4), torch.randn(4))),
        Pattern(doubled, (X,)),
    ]
    lowered = exir_lowering.lower(torch.export.export(model, (X,)), PatternPartitioner("echo", *patterns))
    program = lowered["forward"]
    swished = ["aten.sigmoid.default", "aten.mul.Tensor"]
    weighed = ["aten.permute_copy.default", "aten.addmm.default"]
    assert sorted(parts(program)) == sorted([swished, weighed, swished, ["aten.mul.Tensor"]])
    for example in (X, -X - 3):
        torch.testing.assert_close(program.module()(example), model(example))


QD = torch.ops.quantized_decomposed
INT8 = (-128, 127, torch.int8)


def _weight(weight: Any, scales: Any, zeros: Any) -> Any:
    return QD.dequantize_per_channel.default(weight, scales, zeros, 0, -127, 127, torch.int8)


def int8_conv_relu(x, s, z, w: Constant, ws: Constant, wz: Constant, b: Constant, to, at):  # type: ignore[no-untyped-def]
    x = QD.dequantize_per_tensor.default(x, s, z, *INT8)
    y = torch.ops.aten.convolution.default(x, _weight(w, ws, wz), b, ANY, ANY, ANY, False, ANY, ANY)
    return QD.quantize_per_tensor.default(torch.ops.aten.relu.default(y), to, at, *INT8)


def int8_linear(x, s, z, w: Constant, ws: Constant, wz: Constant, b: Constant, to, at):  # type: ignore[no-untyped-def]
    weight = torch.ops.aten.permute_copy.default(_weight(w, ws, wz), [1, 0])
    y = torch.ops.aten.addmm.default(b, QD.dequantize_per_tensor.default(x, s, z, *INT8), weight)
    return QD.quantize_per_tensor.default(y, to, at, *INT8)


def int8_linear_relu(x, s, z, w: Constant, ws: Constant, wz: Constant, b: Constant, to, at):  # type: ignore[no-untyped-def]
    weight = torch.ops.aten.permute_copy.default(_weight(w, ws, wz), [1, 0])
    y = torch.ops.aten.addmm.default(b, QD.dequantize_per_tensor.default(x, s, z, *INT8), weight)
    return QD.quantize_per_tensor.default(torch.ops.aten.relu.default(y), to, at, *INT8)


def dynamic_linear(x, w: Constant, ws: Constant, wz: Constant, b: Constant):  # type: ignore[no-untyped-def]
    scale, zero = QD.choose_qparams.tensor(x, -128, 127, ANY, torch.int8)
    q = QD.quantize_per_tensor.tensor(x, scale, zero, *INT8)
    x = QD.dequantize_per_tensor.tensor(q, scale, zero, *INT8)
    return torch.ops.aten.addmm.default(b, x, torch.ops.aten.permute_copy.default(_weight(w, ws, wz), [1, 0]))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_quantised_operators_match_with_what_quantises_around_them(dynamic: bool) -> None:
    program = quantized_models.quantized(dynamic)
    patterns = [dynamic_linear] if dynamic else [int8_conv_relu, int8_linear, int8_linear_relu]
    lowered = exir_lowering.lower(program, PatternPartitioner("reference", *map(Pattern, patterns)))
    computing = [
        sum(name in ("aten.convolution.default", "aten.addmm.default") for name in p) for p in parts(lowered["forward"])
    ]
    assert computing == [1] * (2 if dynamic else 3)
    (found,) = exir_lowering.load(lowered.emit().buffer).run("forward", *quantized_models.INPUTS)
    torch.testing.assert_close(found, program.module()(*quantized_models.INPUTS))


def test_supports_compose_with_patterns(layers: ExportedProgram) -> None:
    scope = next(scopes(layers))
    pattern = PatternSupport(Pattern(torch_swish, (X,)))
    proposals = propose_partitions(scope, ops("aten.gelu.default") & dtypes(torch.float32) | pattern)
    assert [[node.name for node in proposal.nodes] for proposal in proposals] == [
        ["aten_gelu_default"],
        ["aten_sigmoid_default", "aten_mul_tensor_1"],
    ]
    assert propose_partitions(scope, pattern & ops("aten.mul.Tensor")) == []


def test_a_pattern_that_matches_nothing_is_warned_of_with_close_names() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(-1).relu()

    def viewed(x: Any) -> Any:
        return aten.relu.default(aten.view.default(x, ANY))

    def connected(x: Any) -> Any:
        return aten.view_copy.default(aten.relu.default(x), ANY)

    program = edge_program(Model(), (X,))
    partitioner = PatternPartitioner(
        "echo", Pattern(viewed), Pattern(connected), Pattern(lambda x: aten.relu.default(x))
    )
    with pytest.warns(UserWarning) as caught:
        partitioner(program)
    texts = [str(warning.message) for warning in caught if warning.category is UserWarning]
    assert len(texts) == 2
    assert "Pattern viewed (aten.view.default, aten.relu.default) matches nothing" in texts[0]
    assert "aten.view.default does not occur in it; aten.view_copy.default does." in texts[0]
    assert "relu.default does not occur" not in texts[0]
    assert texts[1] == (
        "Pattern connected (aten.relu.default, aten.view_copy.default) matches nothing in the program. Its operators "
        "occur, but not connected as in the pattern, or with other arguments."
    )


# ---- attributes, near misses, what stays whole


class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [
                torch.nn.Conv2d(3, 4, 3),
                torch.nn.Conv2d(4, 4, 3, stride=2, padding=1, bias=False),
                torch.nn.Conv2d(4, 4, (1, 3), stride=(1, 2), groups=2),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def conv_relu(x: Any, weight: Constant) -> Any:
    return torch.relu(F.conv2d(x, weight))


IMAGE = torch.randn(1, 3, 12, 12)
CONV = (IMAGE, torch.randn(4, 3, 3, 3))


@pytest.fixture(scope="module")
def convolutions() -> ExportedProgram:
    return edge_program(Convolutions(), (IMAGE,))


def count(program: ExportedProgram, **attributes: Any) -> int:
    return len(groups_of(program, Pattern(conv_relu, CONV, attributes=attributes)))


def groups_of(program: ExportedProgram, *patterns: Pattern) -> list[Sequence[Node]]:
    support = PatternSupport(*patterns)
    return [group for scope in scopes(program) for group in support.groups(scope)]


def test_attributes_say_what_arguments_may_be(convolutions: ExportedProgram) -> None:
    free = {"stride": ANY, "padding": ANY, "bias": ANY, "groups": ANY}
    assert count(convolutions, **free) == 3 and count(convolutions) == 0
    assert count(convolutions, bias=ANY) == 1
    assert count(convolutions, **{**free, "stride": 1}) == 1
    assert count(convolutions, **{**free, "stride": {1, 2}}) == 2
    assert count(convolutions, **{**free, "stride": [1, 2]}) == 1
    assert count(convolutions, **{**free, "stride": {1, 2, (1, 2)}}) == 3
    assert count(convolutions, **{**free, "bias": None}) == 1
    assert count(convolutions, **{**free, "groups": lambda groups: groups > 1}) == 1
    assert count(convolutions, **{**free, "transposed": True}) == 0
    one = {f"aten.convolution.{name}": value for name, value in free.items()}
    assert count(convolutions, **one) == count(convolutions, **{**free, "aten.convolution.default.groups": {1, 2}}) == 3

    def traced(x: Any, weight: Constant) -> Any:
        return aten.relu.default(aten.convolution.default(x, weight, None, 1, 0, 1, False, 0, 1))

    anything = dict.fromkeys(("bias", "stride", "padding", "dilation", "output_padding", "groups"), ANY)
    assert len(groups_of(convolutions, Pattern(traced, attributes=anything))) == 3


def test_attributes_that_are_wrong(convolutions: ExportedProgram) -> None:
    for wrong, part in (
        ({"strid": 1}, "'strid', which none of its operators has. Did you mean 'stride'?"),
        ({"aten.relu.stride": 1}, "none of its operators has"),
        ({"weight": ANY}, "parameter weight is not used"),
        (["stride"], "expected a mapping"),
    ):
        with pytest.raises(InputError, match=re.escape(part)):
            Pattern(conv_relu, CONV, attributes=wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="which an operator of the pattern computes"):
        Pattern(sigmoid_tanh, attributes={"aten.tanh.input": 1})

    def broken(value: Any) -> bool:
        raise ZeroDivisionError("by zero")

    with pytest.raises(PartitionerContractError, match=r"asks of stride raised ZeroDivisionError for \[1, 1\]"):
        count(convolutions, bias=ANY, stride=broken)


def test_near_misses_say_what_differs(convolutions: ExportedProgram) -> None:
    partitioner = PatternPartitioner("echo", Pattern(conv_relu, CONV, attributes={"bias": ANY, "padding": ANY}))
    reasons = {one.node: one.reason for one in partitioner.partition(convolutions).rejections}
    second, third = ("stride of aten_convolution_default_1 is [2, 2], the pattern says [1, 1]",
                     "stride of aten_convolution_default_2 is [1, 2], the pattern says [1, 1]")  # fmt: skip
    assert second in reasons["aten_convolution_default_1"] and second in reasons["aten_relu_default_1"]
    assert third in reasons["aten_convolution_default_2"] and len(reasons) == 4
    graphs.strip_tags(convolutions.graph_module)

    def warned(pattern: Pattern, program: ExportedProgram = convolutions) -> str:
        with pytest.warns(UserWarning, match="matches nothing") as caught:
            PatternPartitioner("echo", pattern).partition(program)
        return str(caught[0].message)

    odd = Pattern(conv_relu, CONV, attributes={"bias": ANY, "stride": {3, 4}, "padding": ANY})
    assert "stride of aten_convolution_default is [1, 1], the pattern says 3 or 4" in warned(odd)
    assert "bias of aten_convolution_default is b_layers_0_bias" in (said := warned(Pattern(conv_relu, CONV))) or (
        "bias of aten_convolution_default is p_layers_0_bias, the pattern says None" in said
    )

    class Computed(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch.relu(F.conv2d(x, weight * 2))

    computed = edge_program(Computed(), CONV)
    assert "its input weight is aten_mul_tensor, no constant" in warned(Pattern(conv_relu, CONV), computed)


class Gelu(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(torch.nn.functional.gelu(self.linear(x)))
        return self.total * 1.5


def linear_gelu(x: Any, weight: Constant, bias: Constant) -> Any:
    return aten.gelu.default(aten.linear.default(x, weight, bias))


def test_an_operator_that_is_decomposed_is_named_with_what_it_became_and_can_stay_whole() -> None:
    program = torch.export.export(Gelu().eval(), (X,))
    with pytest.warns(UserWarning, match="matches nothing") as caught:
        exir_lowering.plan(program, PatternPartitioner("reference", Pattern(linear_gelu)))
    became = "After decomposition, aten.linear.default is aten.permute_copy.default + aten.addmm.default"
    (said,) = (str(one.message) for one in caught if "matches nothing" in str(one.message))
    assert became in said and "keep_whole=[torch.ops.aten.linear.default]" in said
    whole = PatternPartitioner("reference", Pattern(linear_gelu), keep_whole=[aten.linear.default])
    lowered = exir_lowering.lower(program, whole)
    (partition,) = lowered.report.methods[0].partitions
    assert dict(partition.operators) == {"aten.linear.default": 1, "aten.gelu.default": 1}
    (got,) = exir_lowering.load(lowered.emit().buffer).run("forward", X)
    torch.testing.assert_close(got, program.module()(X))


def test_a_pattern_can_own_the_state_that_it_writes() -> None:
    def accumulate(total: Any, x: Any) -> Any:
        return aten.add.Tensor(total, x)

    program = torch.export.export(Gelu().eval(), (X,))
    specs = [CompileSpec("level", b"2")]
    partitioner = PatternPartitioner("reference", Pattern(accumulate), own_state=True, compile_specs=specs)
    lowered = exir_lowering.lower(program, partitioner)
    (owned,) = delegates(lowered["forward"])
    assert list(owned.original_module.graph_signature.buffers_to_mutate.values()) == ["total"]
    assert owned.compile_specs == specs
    loaded, eager = exir_lowering.load(lowered.emit().buffer), program.module()
    for _ in range(3):
        torch.testing.assert_close(loaded.run("forward", X)[0], eager(X))
    with pytest.raises(InputError, match="expected a list of CompileSpec"):
        PatternPartitioner("reference", Pattern(accumulate), compile_specs={"reference": specs})
