"""SupportPartitioner through the whole line: what it claims, what it says of the rest, numbers equal to eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowering_support import delegates, edge_program
from torch.export import export

import exir_lowering
from exir_lowering import CompileSpec, InputError
from exir_lowering.partitioners import Limits, SupportPartitioner, dtypes, everything, ops


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.second(torch.erf(self.first(x))), -1)


MATMUL = ops("aten.addmm", "aten.permute_copy") & dtypes(torch.float32)


def test_claims_what_is_supported_and_explains_the_rest() -> None:
    model, value = Model().eval(), torch.randn(2, 8)
    lowered = exir_lowering.lower(export(model, (value,)), SupportPartitioner({"echo": MATMUL}))
    (method,) = lowered.report.methods
    assert [dict(p.operators) for p in method.partitions] == [
        {"aten.permute_copy.default": 1, "aten.addmm.default": 1}
    ] * 2
    assert [(n.operator, n.reasons[0].code, n.by) for n in method.host] == [
        ("aten.erf.default", "op", "ops(aten.addmm, aten.permute_copy)"),
        ("aten._softmax.default", "op", "ops(aten.addmm, aten.permute_copy)"),
    ]
    assert all("test_by_support.py" in node.source for node in method.host)
    torch.testing.assert_close(lowered["forward"].module()(value), model(value))
    assert not lowered["forward"].state_dict  # the weights went with the partitions


def test_several_backends_with_compile_specs() -> None:
    partitioner = SupportPartitioner(
        {"echo": MATMUL, "other": everything()}, compile_specs={"other": [CompileSpec("level", b"3")]}
    )
    plan = exir_lowering.plan(export(Model().eval(), (torch.randn(2, 8),)), partitioner)
    assert [p.backend_id for p in plan.methods[0].partitions] == ["echo", "other", "echo", "other"]
    program = edge_program(Model(), (torch.randn(2, 8),))
    specs = {spec.backend_id: spec.compile_specs for spec in partitioner(program).partition_tags.values()}
    assert specs == {"echo": [], "other": [CompileSpec("level", b"3")]}


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(
            x.sum() > 0, lambda x, w: torch.sin(x @ w) + 1, lambda x, w: torch.cos(x - w) * 2, (x, self.weight)
        )
        return y + x


@pytest.mark.parametrize("value", [torch.ones(4, 4), -torch.ones(4, 4)])
def test_nested_graphs(value: torch.Tensor) -> None:
    model = Branches().eval()
    support = ops("aten.mm", "aten.add", "aten.sub", "aten.mul")
    lowered = exir_lowering.lower(export(model, (value,)), SupportPartitioner({"echo": support}))
    (method,) = lowered.report.methods
    assert len(delegates(lowered["forward"])) == len(method.partitions) >= 4
    assert {n.operator for n in method.host} >= {"aten.sin.default", "aten.cos.default", "cond"}
    assert all(node.reasons for node in method.host)
    torch.testing.assert_close(lowered["forward"].module()(value), model(value))


def test_a_claimed_call_takes_its_graphs_along() -> None:
    model, value = Branches().eval(), torch.ones(4, 4)
    lowered = exir_lowering.lower(export(model, (value,)), SupportPartitioner({"echo": everything()}))
    (method,) = lowered.report.methods
    assert method.coverage == 1.0 and len(method.partitions) == 1
    assert "submodule_0.aten_sin_default" in method.partitions[0].nodes
    torch.testing.assert_close(lowered["forward"].module()(value), model(value))


def test_operators_are_kept_whole_where_they_are_supported() -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.single, self.wide = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).double()

        def forward(self, x: torch.Tensor) -> Any:
            return self.single(x), self.wide(x.double())

    whole = [torch.ops.aten.linear.default]
    partitioner = SupportPartitioner({"echo": ops("aten.linear") & dtypes(torch.float32)}, keep_whole=whole)
    lowered = exir_lowering.lower(export(Mixed().eval(), (torch.randn(2, 4),)), partitioner)
    (method,) = lowered.report.methods
    assert [dict(p.operators) for p in method.partitions] == [{"aten.linear.default": 1}]
    assert "aten.addmm.default" in {node.operator for node in method.host}


def test_limits_reach_the_plan() -> None:
    partitioner = SupportPartitioner({"echo": MATMUL | ops("aten._softmax")}, limits=Limits(min_nodes=3))
    (method,) = exir_lowering.plan(export(Model().eval(), (torch.randn(2, 8),)), partitioner).methods
    assert [len(p.nodes) for p in method.partitions] == [3]
    (adjustment,) = method.adjustments
    assert adjustment.kind == "dropped" and adjustment.method == "forward" and len(adjustment.nodes) == 2
    dropped = [node for node in method.host if node.reasons[0].code == "dropped"]
    assert [node.node for node in dropped] == list(adjustment.nodes) and "min_nodes=3" in dropped[0].reason


def test_state_that_one_partition_reads_and_writes_moves_with_it() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(x)
            return self.count * 2

    program = export(Counter().eval(), (torch.ones(4),))
    lowered = exir_lowering.lower(program, SupportPartitioner({"echo": everything()}))
    assert lowered["forward"].graph_signature.buffers_to_mutate  # a backend might not keep state
    lowered = exir_lowering.lower(program, SupportPartitioner({"echo": everything()}, own_state=True))
    assert not lowered["forward"].graph_signature.buffers_to_mutate
    (delegate,) = delegates(lowered["forward"])
    assert delegate.original_module.graph_signature.buffers_to_mutate


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"supports": {}}, "expected a mapping from backend ids"),
        ({"supports": ops("aten.add")}, "expected a mapping from backend ids"),
        ({"supports": {"": ops("aten.add")}}, "expected a mapping from backend ids"),
        ({"supports": {"echo": 3}}, "A support was expected"),
        ({"supports": {"echo": MATMUL}, "compile_specs": {"eco": []}}, "not one of its backends: echo"),
        ({"supports": {"echo": MATMUL}, "compile_specs": {"echo": ["x"]}}, "expected a list of CompileSpec"),
        ({"supports": {"echo": MATMUL}, "compile_specs": []}, "expected a mapping from backend ids to lists"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        SupportPartitioner(**arguments)


CONVOLUTION = (torch.nn.Conv2d(3, 4, 3).eval(), (torch.ones(1, 3, 8, 8),))


@pytest.mark.parametrize("name", ["aten.conv2d", "aten.conv2d.default"])
def test_an_operator_that_was_decomposed_matches_nothing(name: str) -> None:
    partitioner = SupportPartitioner({"echo": ops(name) & dtypes(torch.float32) | ops("aten.relu")})
    with pytest.raises(InputError) as error:
        exir_lowering.plan(export(*CONVOLUTION), partitioner)
    text = f"echo supports {name}, which matches nothing: on the way to Edge dialect it became aten.convolution.default"
    assert text in str(error.value) and "keep_whole=[torch.ops.aten.conv2d.default]" in str(error.value)


@pytest.mark.parametrize(
    ("support", "whole", "taken"),
    [
        (ops("aten.conv2d", "aten.convolution"), [], "aten.convolution.default"),
        (ops("aten.conv2d"), [torch.ops.aten.conv2d.default], "aten.conv2d.default"),
        (ops("aten.linear", "aten.relu"), [], None),  # the model has none of them
        (ops("aten.conv2d") | everything(), [], "aten.convolution.default"),
        (ops("aten.conv2d") & dtypes(torch.int8), [torch.ops.aten.conv2d.default], None),
    ],
)
def test_an_operator_may_be_named_in_each_form(support: Any, whole: Any, taken: str | None) -> None:
    plan = exir_lowering.plan(export(*CONVOLUTION), SupportPartitioner({"echo": support}, keep_whole=whole))
    operators = [node for one in plan.methods[0].partitions for node in one.nodes]
    assert operators == ([f"aten_{taken.split('.')[1]}_default"] if taken else [])


def test_what_is_refused_and_replaced_on_the_host_was_not_decomposed_before() -> None:
    """The host has no kernel for it, and what takes its place there comes from it, too."""
    model = torch.nn.AvgPool3d(2)
    partitioner = SupportPartitioner({"echo": ops("aten.avg_pool3d") & dtypes(torch.int8)})
    assert exir_lowering.plan(export(model, (torch.ones(1, 1, 4, 4, 4),)), partitioner).methods[0].host


def test_a_product_of_a_linear_layer_is_one_of_two_operators() -> None:
    partitioner = SupportPartitioner({"echo": ops("aten.linear", "aten.mm")})
    plan = exir_lowering.plan(export(torch.nn.Linear(4, 4), (torch.ones(2, 4),)), partitioner)
    assert not plan.methods[0].partitions
