"""The predicted latency of a plan: what operators, calls and data cost, by hand and on real models."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from lowering_support import edge_program
from models import build
from torch.export import Dim, export
from torch.fx import Node

import exir_lowering
from exir_lowering import InputError, LoweringOptions, graphs
from exir_lowering.partitioners import CostTable, SupportPartitioner, ops
from exir_lowering.plugins import HOST, DefaultCosts
from exir_lowering.plugins.costs import cost_of


class Model(torch.nn.Module):
    """add in Npu, erf on the host, add and mul in Npu."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.erf(x + x)
        return (y + x) * y


NPU = SupportPartitioner({"Npu": ops("aten.add", "aten.mul")})
INPUTS = (torch.randn(4, 8),)
BYTES = 4 * 4 * 8
TABLE = CostTable(
    {HOST: {"aten.erf": 64.0, "aten.add": 8.0, "aten.mul": 8.0}, "Npu": {"aten.add": 1.0, "aten.mul": 2.0}},
    per_byte=0.25,
    per_call={"Npu": 16.0},
)


def predict(module: torch.nn.Module, inputs: Any, partitioner: Any = None, costs: Any = None, **options: Any) -> Any:
    program = export(module.eval(), inputs, **options)
    plan = exir_lowering.plan(program, partitioner, options=LoweringOptions(costs=costs))
    return plan.methods[0].prediction


def test_a_table_gives_the_sum_by_hand() -> None:
    predicted = predict(Model(), INPUTS, NPU, TABLE)
    assert predicted.host_seconds == 64
    assert predicted.delegate_seconds == 1 + 1 + 2 + 2 * 16
    # The input and the result of erf go to Npu; the sum goes to erf, the product is returned.
    assert predicted.crossing_seconds == 4 * BYTES * 0.25
    assert predicted.seconds == 64 + 36 + BYTES
    (erf,) = predicted.largest
    assert (erf.operator, erf.count, erf.seconds) == ("aten.erf.default", 1, 64)
    assert "allowing aten.erf.default in Npu would merge 2 partitions into 1" in erf.would_remove
    assert predicted.guessed == 0


def test_without_a_partitioner_everything_is_on_the_host() -> None:
    predicted = predict(Model(), INPUTS, None, TABLE)
    assert predicted.seconds == predicted.host_seconds == 64 + 2 * 8 + 8
    assert [cost.operator for cost in predicted.largest] == ["aten.erf.default", "aten.add.Tensor", "aten.mul.Tensor"]
    assert predicted.largest[0].would_remove == "the method has no partitioner"


def test_lower_reports_the_same_prediction() -> None:
    program = export(Model(), INPUTS)
    lowered = exir_lowering.lower(program, XnnpackPartitioner())
    assert (
        lowered.report.methods[0].prediction == exir_lowering.plan(program, XnnpackPartitioner()).methods[0].prediction
    )


# -- the default model -------------------------------------------------------------------------------------------------


def test_the_default_model_knows_what_is_slow_on_the_host() -> None:
    """The order of what operators cost is that of their kernels, which differ by orders of magnitude."""

    class Pieces(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            pooled = torch.nn.functional.avg_pool2d(x[None, None], 200, ceil_mode=True)
            return pooled, torch.where(x > 0, x, 0.0), x + 1, x.mean()

    program = edge_program(Pieces(), (torch.randn(256, 256),))
    costs = {n.name: DefaultCosts().node_cost(n, HOST) for n in program.graph.nodes if graphs.is_operator(n)}
    pool, where, add, mean = (
        max(cost for name, cost in costs.items() if part in name) for part in ("avg_pool2d", "where", "add", "mean")
    )
    assert pool > where > 5 * add and where > 5 * mean and mean > 0


def test_the_largest_costs_of_a_transformer_and_what_removes_them() -> None:
    predicted = predict(*build("wide_vit"), "xnnpack")
    assert 0 < predicted.host_seconds < predicted.seconds
    parts = predicted.host_seconds + predicted.delegate_seconds + predicted.crossing_seconds
    assert predicted.seconds == pytest.approx(parts)
    assert 1 <= len(predicted.largest) <= 3
    assert sorted((cost.seconds for cost in predicted.largest), reverse=True) == [c.seconds for c in predicted.largest]
    assert all("no configuration for" in cost.would_remove for cost in predicted.largest)


def test_attention_that_was_decomposed_is_named() -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    inputs = (torch.randn(1, 2, 32, 16), torch.ones(32, 32, dtype=torch.bool))
    first = predict(Attention(), inputs, "xnnpack").largest[0]
    assert first.operator == "aten.where.self"
    assert "safe-softmax left it: q is an input of the model" in first.would_remove and "assume=" in first.would_remove
    program = torch.export.export(Attention(), inputs)
    as_it_is = exir_lowering.plan(program, "xnnpack", options=LoweringOptions(rewrites="none")).methods[0]
    assert 'LoweringOptions(rewrites="safe")' in as_it_is.prediction.largest[0].would_remove


def test_delegating_and_nothing_at_all_cost_what_they_should() -> None:
    class Nothing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert predict(Nothing(), INPUTS).seconds == 0.0
    module, inputs = build("mobilenet_v2")
    assert predict(module, inputs, "xnnpack").seconds < predict(module, inputs).seconds / 10


def test_a_backend_that_a_table_lacks_gets_default_costs() -> None:
    table = CostTable({HOST: {"aten.erf": 64.0}}, per_byte=0.0)
    predicted = predict(Model(), INPUTS, NPU, table)
    assert predicted.guessed == 3 and predicted.host_seconds == 64
    assert 0 < predicted.delegate_seconds < 1e-4


# -- sizes and nested graphs -------------------------------------------------------------------------------------------


def test_symbolic_sizes_count_as_in_the_example() -> None:
    for model in (None, host_table(erf=1, add=2, mul=3)):
        fixed = predict(Model(), (torch.randn(64, 8),), None, model)
        dynamic = predict(Model(), (torch.randn(64, 8),), None, model, dynamic_shapes=({0: Dim("n", max=999)},))
        assert dynamic.seconds == pytest.approx(fixed.seconds)


class Branches(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: torch.erf(x) * 1.5, lambda x: x + x, (x,))


def host_table(**costs: float) -> CostTable:
    return CostTable({HOST: {f"aten.{name}": cost for name, cost in costs.items()}}, 0.0, default={HOST: 0.0})


def test_the_larger_branch_of_a_cond_counts() -> None:
    assert predict(Branches(), INPUTS, None, host_table(erf=64, mul=4, add=2, sum=1)).seconds == 64 + 4 + 1
    assert predict(Branches(), INPUTS, None, host_table(erf=1, mul=4, add=20, sum=1)).seconds == 20 + 1


def test_the_graph_of_a_map_counts_for_each_element() -> None:
    class Mapped(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch._higher_order_ops.map(lambda row: torch.erf(row) + row, x)

    predicted = predict(Mapped(), INPUTS, None, host_table(erf=64, add=2))
    assert predicted.seconds == 4 * (64 + 2)
    assert (predicted.largest[0].count, predicted.largest[0].seconds) == (1, 4 * 64)


def test_partitions_in_a_nested_graph_are_called_as_often_as_it() -> None:
    class Mapped(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch._higher_order_ops.map(lambda row: torch.erf(row + row), x)

    predicted = predict(Mapped(), INPUTS, NPU, TABLE)
    assert predicted.host_seconds == 4 * 64
    assert predicted.delegate_seconds == 4 * (1 + 16)
    assert predicted.crossing_seconds == 4 * 2 * (BYTES / 4) * 0.25


# -- a few nodes -------------------------------------------------------------------------------------------------------


def test_cost_of_compares_forms_of_a_few_nodes() -> None:
    nodes = [n for n in edge_program(Model(), INPUTS).graph.nodes if graphs.is_operator(n)]
    assert cost_of(nodes, HOST, TABLE) == 64 + 3 * 8 and cost_of([], HOST, TABLE) == 0
    assert cost_of([n for n in nodes if "erf" not in n.name], "Npu", TABLE) == 1 + 1 + 2
    assert cost_of(nodes, HOST) > cost_of(nodes, "XnnpackBackend") > 0


# -- wrong models ------------------------------------------------------------------------------------------------------


@dataclass
class Wrong:
    """A model with one wrong answer."""

    node: Any = 1.0
    call: Any = 1.0
    byte: Any = 1.0
    unit: Any = "seconds"

    @property
    def byte_cost(self) -> Any:
        return self._give(self.byte)

    def node_cost(self, node: Node, place: str) -> Any:
        return self._give(self.node)

    def call_cost(self, place: str) -> Any:
        return self._give(self.call)

    def _give(self, answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize("answer", [-1.0, math.nan, math.inf, "one", True, [1.0], 1j, RuntimeError("no table")])
@pytest.mark.parametrize("what", ["node", "call", "byte"])
def test_a_wrong_answer_names_the_model_and_the_question(what: str, answer: Any) -> None:
    said = "no table" if isinstance(answer, Exception) else "expected a finite number"
    with pytest.raises(InputError, match=said) as raised:
        predict(Model(), INPUTS, NPU, Wrong(**{what: answer}))
    assert "Wrong" in str(raised.value) and what in str(raised.value)


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        ({"aten.add": 1.0}, "has no node_cost, no call_cost, no byte_cost, no unit"),
        (CostTable, "is a class"),
        (Wrong(unit="cycles"), "'cycles', expected 'seconds'"),
    ],
)
def test_what_is_no_model_is_refused(costs: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        LoweringOptions(costs=costs)


# -- how it is shown ---------------------------------------------------------------------------------------------------


def test_text_json_and_page_show_it() -> None:
    table = CostTable({HOST: {"aten.erf": 0.25}, "Npu": {"aten.add": 0.002, "aten.mul": 0.002}}, 0.0)
    plan = exir_lowering.plan(export(Model(), INPUTS), NPU, options=LoweringOptions(costs=table))
    text = plan.to_text()
    assert "Predicted latency 256.0 ms: host 250.0 ms, delegates 6.0 ms, data between them 0 s" in text
    assert "Largest costs on the host (1)\n    1 x aten.erf.default: 250.0 ms: " in text
    data = json.loads(plan.to_json())["methods"][0]["prediction"]
    assert data["seconds"] == pytest.approx(0.256) and data["largest"][0]["operator"] == "aten.erf.default"
    assert "Predicted latency 256.0 ms" in plan.to_html()


def test_text_says_what_the_given_costs_lack() -> None:
    options = LoweringOptions(costs=host_table(erf=1.0))
    text = exir_lowering.plan(export(Model(), INPUTS), NPU, options=options).to_text(width=200)
    assert "3 operators without a cost, taken from the default model" in text


def test_equal_lowerings_predict_the_same() -> None:
    first, second = (predict(*build("vit"), "xnnpack") for _ in range(2))
    assert first == second
