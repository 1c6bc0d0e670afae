"""Costs measured in the runtime, and what CostPartitioner chooses by them, on a model that runs there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from interleaving import interleaved
from lowering_support import TagPartitioner, by_operator
from torch import nn
from torch.export import Dim, ExportedProgram, export

from exir_lowering import BackendUnavailableError, InputError, load, lower
from exir_lowering.partitioners.by_cost import CostPartitioner
from exir_lowering.partitioners.cost.cost_graph import units_together
from exir_lowering.partitioners.cost.measure import measure_costs
from exir_lowering.partitioners.cost.tables import CostTable, signature


class Net(nn.Module):
    """Convolutions, a linear that XNNPACK keeps whole, a max pool that the host has no kernel for, a cumsum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.linear = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.max_pool2d(torch.relu(self.first(x)), 2)
        x = torch.relu(self.second(x)).mean((2, 3))
        return self.linear(torch.cumsum(x + x, 1) * x)


INPUT = (torch.ones(1, 3, 32, 32).cumsum(2) / 32,)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def program(net: nn.Module) -> ExportedProgram:
    return export(net, INPUT)


@pytest.fixture(scope="module")
def table(program: ExportedProgram) -> CostTable:
    return measure_costs(program, XnnpackPartitioner(), repeat=10, warmup=1)


def names(table: CostTable, place: str) -> set[str]:
    return {key.partition("(")[0] for key in table.places[place]}


def test_the_table_has_what_each_place_can_run(table: CostTable) -> None:
    assert set(table.places) == {"host", "XnnpackBackend"}
    assert {"aten.convolution.default", "aten.mean.dim", "aten.cumsum.default", "aten.relu.default"} <= names(
        table, "host"
    )
    backend = names(table, "XnnpackBackend")
    assert {"aten.convolution.default", "aten.linear.default", "aten.max_pool2d.default"} <= backend
    assert "aten.cumsum.default" not in backend
    assert "aten.max_pool2d.default" not in names(table, "host")
    convolutions = [key for key in table.places["host"] if key.startswith("aten.convolution.default(")]
    assert len(convolutions) == 2  # by their sizes
    costs = [cost for place in table.places.values() for cost in place.values()]
    assert all(math.isfinite(cost) and cost >= 0 for cost in costs) and max(costs) > 0
    assert table.per_byte > 0 and set(table.per_call) == {"XnnpackBackend"}


def test_what_is_chosen_is_predicted_to_be_no_slower_and_is_right(
    net: nn.Module, program: ExportedProgram, table: CostTable
) -> None:
    partitioner = CostPartitioner.from_partitioner(table, XnnpackPartitioner())
    chosen, everything = lower(program, partitioner), lower(program, XnnpackPartitioner())
    seen: list[Any] = []

    class Watching(CostPartitioner):
        def partition(self, exported_program: ExportedProgram) -> Any:
            seen.append(self.estimate(exported_program))
            return super().partition(exported_program)

    lower(program, Watching.from_partitioner(table, XnnpackPartitioner()))
    assert seen[0].chosen <= min(seen[0].greedy, seen[0].host)
    files = [load(lowered.emit().buffer) for lowered in (chosen, everything)]
    for file in files:
        (output,) = file.run("forward", *INPUT)
        torch.testing.assert_close(output, net(*INPUT), rtol=1e-4, atol=1e-5)
    ours, theirs = interleaved(files, INPUT, 30)
    print(f"chosen {ours * 1e6:.1f} us, everything delegated {theirs * 1e6:.1f} us, ratio {ours / theirs:.2f}")
    taken = {node.operator for node in chosen.report.methods[0].nodes if node.partition}
    assert {"aten.convolution.default", "aten.linear.default", "aten.max_pool2d.default"} <= taken
    explained = [host.reasons[0] for host in chosen.report.methods[0].host]
    assert all(reason.reason for reason in explained)


def test_the_table_is_the_same_from_a_file(program: ExportedProgram, table: CostTable, tmp_path: Path) -> None:
    again = CostTable.load(table.save(tmp_path / "costs.json"))
    assert again == table
    plans = [
        [(node.name, node.partition) for node in lowered.report.methods[0].nodes]
        for lowered in (
            lower(program, CostPartitioner.from_partitioner(t, XnnpackPartitioner())) for t in (table, again)
        )
    ]
    assert plans[0] == plans[1]


def test_units_of_a_partitioner_without_configurations(program: ExportedProgram) -> None:
    from executorch.exir import to_edge

    edge = to_edge(program).exported_program()
    relu = by_operator("aten.relu.default")
    units = units_together(edge, TagPartitioner(relu, constants=False))
    assert [[signature(node).partition("(")[0] for node in unit] for unit in units] == [["aten.relu.default"] * 2]
    assert not any("delegation_tag" in node.meta for node in edge.graph.nodes)


def test_what_cannot_be_measured(program: ExportedProgram, net: nn.Module) -> None:
    with pytest.raises(InputError, match="repeat=0"):
        measure_costs(program, XnnpackPartitioner(), repeat=0)
    dynamic = export(nn.ReLU(), (torch.randn(4, 3),), dynamic_shapes={"input": {0: Dim("rows", min=2, max=9)}})
    with pytest.raises(InputError, match=r"aten.relu.default\(float32\[\?, 3\]\) has a size that is not known"):
        measure_costs(dynamic, XnnpackPartitioner())
    small = export(nn.ReLU(), (torch.randn(3),))
    with pytest.raises(BackendUnavailableError):
        measure_costs(small, TagPartitioner(by_operator("aten.relu.default")))
