"""CostPartitioner: the cheapest assignment against brute force, on graphs of numbers and on real Edge programs."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from lowering_support import TagPartitioner, by_operator, delegates, edge_program
from torch import nn
from torch.export import ExportedProgram

from exir_lowering import (
    ExplainedResult,
    InputError,
    PartitionerContractError,
    load,
    lower,
    to_backend,
)
from exir_lowering.graphs import operator_name
from exir_lowering.graphs.measures import value_bytes
from exir_lowering.partitioners.algorithms import assignment
from exir_lowering.partitioners.algorithms.assignment import HOST, AssignedValue, AssignmentProblem
from exir_lowering.partitioners.algorithms.limits import Limits
from exir_lowering.partitioners.by_cost import CostPartitioner
from exir_lowering.partitioners.cost.tables import CostTable, RooflineModel, signature
from exir_lowering.partitioners.supports.checks import everything, ops

# -- graphs of numbers -------------------------------------------------------------------------------------------------


def random_problem(seed: int, places: int, most: int) -> AssignmentProblem:
    rng = random.Random(seed)
    count = rng.randint(1, most)
    costs = [
        [rng.randrange(20)] + [rng.randrange(20) if rng.random() < 0.7 else None for _ in range(places - 1)]
        for _ in range(count)
    ]
    values = []
    for producer in (HOST, HOST, *range(count)):
        readers = tuple(unit for unit in range(producer + 1, count) if rng.random() < 0.4)
        if producer != HOST and rng.random() < 0.3:
            readers += (HOST,)
        if readers:
            values.append(AssignedValue(rng.randrange(12), producer, readers))
    return AssignmentProblem(costs, values)


def optimum(problem: AssignmentProblem) -> int:
    possible = [[place for place, cost in enumerate(costs) if cost is not None] for costs in problem.costs]
    return min(assignment.compute_cost(problem, places) for places in itertools.product(*possible))


def check_possible(problem: AssignmentProblem, places: list[int]) -> None:
    assert all(costs[place] is not None for costs, place in zip(problem.costs, places, strict=True))


def test_one_backend_is_exact() -> None:
    for seed in range(600):
        problem = random_problem(seed, places=2, most=9)
        places = assignment.find_cheapest(problem)
        check_possible(problem, places)
        assert assignment.compute_cost(problem, places) == optimum(problem), seed


@pytest.mark.parametrize("places", [3, 4])
def test_several_backends_are_within_the_bound(places: int) -> None:
    worst, missed = 1.0, 0
    for seed in range(200):
        problem = random_problem(seed, places, most=6)
        found, best = assignment.find_cheapest(problem), optimum(problem)
        check_possible(problem, found)
        cost = assignment.compute_cost(problem, found)
        assert cost <= (places - 1) * best, seed
        assert cost <= assignment.compute_cost(problem, assignment.assign_greedily(problem))
        assert cost <= assignment.compute_cost(problem, assignment.assign_to_host(problem))
        missed += cost > best
        worst = max(worst, cost / best if best else 1.0)
    print(f"{places} places: {missed} of 200 above the optimum, by a factor of {worst:.2f} at most")


def test_a_value_crosses_once_for_each_destination() -> None:
    # Unit 0 is on the host only; 1 and 2 read its value and save 3 each elsewhere: not enough for two crossings of 4.
    shared = AssignmentProblem([[0, None], [3, 0], [3, 0]], [AssignedValue(4, 0, (1, 2))])
    assert assignment.find_cheapest(shared) == [0, 1, 1]
    assert assignment.compute_cost(shared, [0, 1, 1]) == 4
    two = AssignmentProblem(shared.costs, [AssignedValue(4, 0, (1,)), AssignedValue(4, 0, (2,))])
    assert assignment.find_cheapest(two) == [0, 0, 0]
    # Two destinations are two crossings.
    apart = AssignmentProblem([[0, None, None], [9, 0, None], [9, None, 0]], [AssignedValue(4, 0, (1, 2))])
    assert assignment.find_cheapest(apart) == [0, 1, 2]
    assert assignment.compute_cost(apart, [0, 1, 2]) == 8


def test_units_that_cannot_be_on_the_host() -> None:
    for seed in range(300):
        problem = random_problem(seed, places=2 + seed % 2, most=7)
        costs = [[None, *row[1:]] if seed % 3 and any(c is not None for c in row[1:]) else row for row in problem.costs]
        pinned = AssignmentProblem(
            [new if unit % 3 == 0 else old for unit, (new, old) in enumerate(zip(costs, problem.costs, strict=True))],
            problem.values,
        )
        found = assignment.find_cheapest(pinned)
        check_possible(pinned, found)
        assert assignment.compute_cost(pinned, found) <= (problem.places - 1) * optimum(pinned)
        assert assignment.compute_cost(pinned, found) <= assignment.compute_cost(
            pinned, assignment.assign_to_host(pinned)
        )


def test_a_value_that_comes_back_is_paid_both_ways() -> None:
    problem = AssignmentProblem(
        [[5, 0], [0, None], [6, 0]],
        [AssignedValue(3, 0, (1, 2)), AssignedValue(4, 1, (2,)), AssignedValue(1, 2, (HOST,))],
    )
    assert assignment.find_cheapest(problem) == [1, 0, 1]
    assert assignment.compute_cost(problem, [1, 0, 1]) == 3 + 4 + 1


def test_of_equally_cheap_assignments_the_one_that_delegates_least() -> None:
    assert assignment.find_cheapest(AssignmentProblem([[2, 2], [3, 1]], [])) == [0, 1]
    assert assignment.find_cheapest(AssignmentProblem([[2, 1], [3, 2]], [AssignedValue(2, 1, (HOST,))])) == [1, 0]


def test_calls_of_each_partition() -> None:
    """Whole partitions go back; the result costs no more than the cut, everything, and nothing."""

    def partitions(places: Any) -> list[list[int]]:
        runs = itertools.groupby(range(len(places)), key=places.__getitem__)
        return [units for place, units in ((place, list(units)) for place, units in runs) if place]

    def total(problem: AssignmentProblem, places: list[int], calls: list[int]) -> int:
        return assignment.compute_cost(problem, places) + sum(calls[places[units[0]]] for units in partitions(places))

    went_back = 0
    for seed in range(300):
        problem = random_problem(seed, places=2 + seed % 2, most=12)
        calls = [0, 9, 5][: problem.places]
        found = assignment.assign_with_calls(problem, calls, partitions)
        check_possible(problem, found)
        candidates = [
            assignment.find_cheapest(problem),
            assignment.assign_greedily(problem),
            assignment.assign_to_host(problem),
        ]
        lowest = min(total(problem, places, calls) for places in candidates)
        assert total(problem, found, calls) <= lowest
        went_back += total(problem, found, calls) < lowest
    assert went_back > 5


def test_a_large_graph_takes_no_time() -> None:
    rng = random.Random(0)
    costs = [[rng.random(), rng.random() if rng.random() < 0.8 else None] for _ in range(5_000)]
    scaled = [[None if c is None else int(c * 10**30) for c in row] for row in costs]
    values = [
        AssignedValue(
            rng.randrange(10**30), unit, tuple({rng.randrange(unit + 1, 5_000) for _ in range(rng.randint(1, 3))})
        )
        for unit in range(4_999)
    ]
    problem = AssignmentProblem(scaled, values)
    places = assignment.find_cheapest(problem)
    cost = assignment.compute_cost(problem, places)
    assert cost <= assignment.compute_cost(problem, assignment.assign_greedily(problem))
    for unit in rng.sample(range(5_000), 50):  # no single unit can be better off elsewhere
        other = 1 - places[unit]
        if problem.costs[unit][other] is not None:
            moved = [*places[:unit], other, *places[unit + 1 :]]
            assert assignment.compute_cost(problem, moved) >= cost


# -- Edge programs -----------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Two users of one value, a split, an operator that only the host takes, a shared input, a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = x + self.weight
        left, right = torch.split(torch.sigmoid(a), 2, dim=1)
        b = torch.sin(torch.relu(a)) * y
        return left * left, torch.cos(right) - left, b + a


@pytest.fixture(scope="module")
def branches() -> ExportedProgram:
    return edge_program(Branches(), (torch.randn(3, 4), torch.randn(3, 4)))


NAMES = (
    "aten.add.Tensor",
    "aten.sigmoid.default",
    "aten.split_with_sizes_copy.default",
    "aten.split_copy.Tensor",
    "aten.relu.default",
    "aten.sin.default",
    "aten.cos.default",
    "aten.mul.Tensor",
    "aten.sub.Tensor",
)


def random_table(rng: random.Random, places: tuple[str, ...], **given: Any) -> CostTable:
    costs = {place: {name: rng.randrange(1, 40) / 8 for name in NAMES} for place in ("host", *places)}
    for place in places:
        for name in rng.sample(NAMES, 2):
            del costs[place][name]
    return CostTable(costs, per_byte=rng.choice([0.0, 1 / 64, 1 / 16]), **given)


def placed(program: ExportedProgram, result: ExplainedResult) -> dict[str, str]:
    """Return the place of each computing node by name, as its tag says."""
    tags = result.partition_tags
    return {
        node.name: tags[node.meta["delegation_tag"]].backend_id if "delegation_tag" in node.meta else "host"
        for node in program.graph.nodes
        if node.op == "call_function"
    }


def cost_of(program: ExportedProgram, table: CostTable, place_of: dict[str, str]) -> float:
    """The objective, written down once more, from the definition."""
    total = 0.0
    lifted = {*program.graph_signature.parameters, *program.graph_signature.buffers}
    held = {n for n, target in program.graph_signature.inputs_to_parameters.items() if target in lifted}
    for node in program.graph.nodes:
        if node.op == "output" or node.name in held:
            continue
        here = place_of.get(node.name, "host")
        if node.op == "call_function" and "getitem" not in node.name:
            cost = table.node_cost(node, here)
            assert cost is not None
            total += cost
        destinations = {place_of.get(user.name, "host") for user in node.users} - {here}
        if not all("getitem" in user.name for user in node.users):
            total += value_bytes(node) * table.per_byte * len(destinations)
    return total


def copied(program: ExportedProgram) -> ExportedProgram:
    from exir_lowering.graphs import copy_program

    return copy_program(program)


@pytest.mark.parametrize("backends", [("echo",), ("echo", "other")])
def test_a_real_program_is_assigned_as_brute_force_does(branches: ExportedProgram, backends: tuple[str, ...]) -> None:
    rng = random.Random(1)
    computing = [n for n in branches.graph.nodes if n.op == "call_function"]
    movable = [n for n in computing if "getitem" not in n.name]
    assert len(computing) > len(movable) >= 9
    for _ in range(6):
        table = random_table(rng, backends)
        partitioner = CostPartitioner(table, {name: everything() for name in backends})
        program = copied(branches)
        found = placed(program, partitioner.partition(program))
        predicted = partitioner.estimate(branches)
        assert predicted.chosen == pytest.approx(cost_of(branches, table, found))
        assert predicted.chosen <= min(predicted.greedy, predicted.host)
        if len(backends) > 1:  # on graphs of numbers only, above
            continue
        best = float("inf")
        for places in itertools.product(*([p for p in table.places if table.node_cost(n, p)] for n in movable)):
            place_of = {node.name: place for node, place in zip(movable, places, strict=True)}
            place_of |= {n.name: place_of[n.args[0].name] for n in computing if n.name not in place_of}
            best = min(best, cost_of(branches, table, place_of))
        assert predicted.chosen == pytest.approx(best)


def table_of(host: float, echo: float, **given: Any) -> CostTable:
    return CostTable(
        {"host": dict.fromkeys(NAMES, host), "echo": dict.fromkeys(NAMES, echo)}, **{"per_byte": 1e-8, **given}
    )


def test_what_is_cheaper_is_lowered_and_the_rest_is_explained(branches: ExportedProgram) -> None:
    table = table_of(1e-6, 2e-7)
    expensive = {**table.places["echo"], "aten.sin.default": 1.1e-6, "aten.cos.default": 5e-6}
    table = CostTable({**table.places, "echo": expensive}, per_byte=1e-9)
    lowered = to_backend(branches, CostPartitioner(table, {"echo": ~ops("aten.relu.default")}))
    (method,) = lowered.report.methods
    reasons = {host.operator: host.reasons[0] for host in method.host}
    assert set(reasons) == {"aten.relu.default", "aten.sin.default", "aten.cos.default"}
    assert reasons["aten.relu.default"].code == "denied"
    assert (reasons["aten.sin.default"].code, reasons["aten.sin.default"].by) == ("cost", "CostPartitioner")
    told = "cheaper on the host: 1e-06 s there, 1.1e-06 s on echo"
    assert reasons["aten.sin.default"].reason == told
    assert "cheaper on the host: 1e-06 s there, 5e-06 s on echo" in reasons["aten.cos.default"].reason
    assert len(delegates(lowered["forward"])) == len(method.partitions) > 0


def test_infinite_costs_keep_operators_on_the_host(branches: ExportedProgram) -> None:
    table = table_of(5.0, 1.0)
    some = {name: cost for name, cost in table.places["echo"].items() if name != "aten.sin.default"}
    program = copied(branches)
    result = CostPartitioner(
        CostTable({**table.places, "echo": some}, per_byte=0.0), {"echo": ~ops("aten.cos.default")}
    ).partition(program)
    assert {r.target: (r.code, r.reason) for r in result.rejections} == {
        "aten.sin.default": ("cost", "echo takes it, but there is no cost of aten.sin.default there"),
        "aten.cos.default": ("denied", "excluded by ~ops(aten.cos.default)"),
    }
    on_host = {name for name, place in placed(program, result).items() if place == "host"}
    assert {name.split("_")[1] for name in on_host} == {"sin", "cos"}


def test_a_signature_counts_before_the_name(branches: ExportedProgram) -> None:
    add = next(n for n in branches.graph.nodes if operator_name(n) == "aten.add.Tensor")
    assert signature(add) == "aten.add.Tensor(float32[3, 4], float32[4])"
    table = CostTable(
        {"host": {signature(add): 3, "aten.add": 2}, "echo": {"aten.add.Tensor": 1, "aten.add": 5}}, per_byte=0
    )
    assert [table.node_cost(add, place) for place in ("host", "echo", "none")] == [3, 1, None]
    other = [n for n in branches.graph.nodes if operator_name(n) == "aten.add.Tensor"][-1]
    assert table.node_cost(other, "host") == 2


def test_the_cost_of_a_call_sends_small_partitions_back() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(6):
                x = torch.relu(torch.relu(torch.relu(x)))
                x = torch.sin(torch.relu(torch.sin(x)))  # a lone relu between two that stay
            return x

    program = edge_program(Chain(), (torch.randn(4),))
    places = {"host": {"aten.relu.default": 10, "aten.sin.default": 1}, "echo": {"aten.relu.default": 2}}

    def partitions(call: float) -> int:
        table = CostTable(places, per_byte=0, per_call={"echo": call})
        partitioner = CostPartitioner(table, {"echo": everything()})
        estimate = partitioner.estimate(program)
        assert estimate.chosen <= min(estimate.greedy, estimate.host)
        return len(delegates(to_backend(program, partitioner)["forward"]))

    assert [partitions(call) for call in (0, 7, 9, 23, 25)] == [12, 12, 6, 6, 0]


def test_call_cost_is_told() -> None:
    program = edge_program(Branches(), (torch.randn(3, 4), torch.randn(3, 4)))
    table = table_of(1.0, 0.5, per_byte=0.0, per_call={"echo": 100.0}, unit="ms")
    result = CostPartitioner(table, {"echo": everything()}).partition(program)
    assert not result.partition_tags
    assert {r.reason for r in result.rejections} == {
        "cheaper on the host: 1 ms there, 0.5 ms on echo and 1e+02 ms for a call"
    }


def test_nested_graphs_are_assigned_on_their_own() -> None:
    class Choice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda y: torch.relu(y) + y, lambda y: torch.sin(y), [x]) * 2

    program = edge_program(Choice(), (torch.randn(3),))
    host = {"aten.relu.default": 9, "aten.add.Tensor": 2, "aten.sin.default": 1, "aten.mul.Tensor": 1, "aten.sum": 1}
    host["aten.gt"] = 1
    table = CostTable(
        {"host": host, "echo": {"aten.relu.default": 1, "aten.add.Tensor": 1}}, per_byte=0.01, default={"host": 0}
    )
    partitioner = CostPartitioner(table, {"echo": everything()})
    estimate = partitioner.estimate(program)
    assert estimate.host == 15  # both branches
    assert estimate.chosen == pytest.approx(15 - 9 + 1 - 2 + 1 + 24 * 0.01)
    lowered = to_backend(program, partitioner)
    (delegate,) = delegates(lowered["forward"])
    names = {operator_name(n) for n in delegate.original_module.graph.nodes if n.op == "call_function"}
    assert names == {"aten.relu.default", "aten.add.Tensor"}


def test_the_same_program_gives_the_same_tags(branches: ExportedProgram) -> None:
    table = random_table(random.Random(5), ("echo", "other"))
    runs = []
    for _ in range(2):
        program = copied(branches)
        result = CostPartitioner(table, {"echo": everything(), "other": everything()}).partition(program)
        runs.append((placed(program, result), result.rejections))
    assert runs[0] == runs[1]


def test_limits_apply_after_the_costs() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(torch.sin(torch.relu(torch.relu(x))))

    program = edge_program(Two(), (torch.randn(4),))
    places = {"host": {"aten.relu.default": 10, "aten.sin.default": 1}, "echo": {"aten.relu.default": 1}}
    partitioner = CostPartitioner(CostTable(places, 0.0), {"echo": everything()}, limits=Limits(min_nodes=2))
    lowered = to_backend(program, partitioner)
    assert len(delegates(lowered["forward"])) == 1
    codes = {host.node: host.reasons[0].code for host in lowered.report.methods[0].host}
    assert sorted(codes.values()) != ["cost", "cost"]
    assert len(codes) == 2


def test_roofline() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, y) + 1

    program = edge_program(Net(), (torch.randn(8, 16), torch.randn(16, 4)))
    mm = next(n for n in program.graph.nodes if operator_name(n) == "aten.mm.default")
    model = RooflineModel({"host": 1e3, "echo": 1e6}, {"host": 1e3, "echo": 1e3}, per_byte=0.0)
    assert model.node_cost(mm, "host") == pytest.approx(max(2 * 8 * 16 * 4 / 1e3, 4 * (128 + 64 + 32) / 1e3))
    assert model.node_cost(mm, "echo") == pytest.approx(4 * (128 + 64 + 32) / 1e3)
    assert model.node_cost(mm, "other") is None
    assert CostPartitioner(model, {"echo": everything()}).partition(program).partition_tags
    with pytest.raises(InputError, match="bytes_per_second"):
        RooflineModel({"host": 1.0}, {}, 0.0)
    with pytest.raises(InputError, match=r"flops_per_second\['host'\] is 0, expected a finite number above 0"):
        RooflineModel({"host": 0}, {"host": 1.0}, 0.0)


# -- choosing among what another partitioner takes ---------------------------------------------------------------------


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.linear = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.sin(torch.relu(self.conv(x))).mean((2, 3))) * 2


def xnnpack_table(host: float, backend: float) -> CostTable:
    default = {"host": host, "XnnpackBackend": backend}
    return CostTable({"host": {}, "XnnpackBackend": {}}, 0.0, default=default)


def test_xnnpack_keeps_its_groups_and_runs() -> None:
    torch.manual_seed(0)
    net, x = ConvNet().eval(), torch.randn(1, 3, 8, 8)
    exported = torch.export.export(net, (x,))
    everything_delegated = lower(exported, XnnpackPartitioner())
    chosen = lower(exported, CostPartitioner.from_partitioner(xnnpack_table(2.0, 1.0), XnnpackPartitioner()))
    assert len(delegates(chosen["forward"])) == len(delegates(everything_delegated["forward"]))
    nothing = lower(exported, CostPartitioner.from_partitioner(xnnpack_table(1.0, 2.0), XnnpackPartitioner()))
    # linear is kept from decomposition, so it has no kernel on the host
    assert {n.operator for n in nothing.report.methods[0].nodes if n.partition} == {"aten.linear.default"}
    for lowered in (chosen, nothing):
        (output,) = load(lowered.emit().buffer).run("forward", x)
        torch.testing.assert_close(output, net(x), rtol=1e-4, atol=1e-5)
    table = xnnpack_table(2.0, 1.0)
    cheap_conv = {"aten.convolution.default": 0.1, "aten.relu.default": 0.1}
    some = lower(
        exported,
        CostPartitioner.from_partitioner(
            CostTable({**table.places, "host": cheap_conv}, 0.0, default=table.default), XnnpackPartitioner()
        ),
    )
    assert {"aten.convolution.default", "aten.relu.default"} <= {h.operator for h in some.report.methods[0].host}
    assert len(delegates(some["forward"])) >= 1


def test_other_partitioners_keep_their_partitions_whole(branches: ExportedProgram) -> None:
    def tag_of(node: Any) -> str:
        return "first" if operator_name(node) in ("aten.relu.default", "aten.sin.default") else "second"

    table = table_of(2.0, 1.0, per_byte=0.0)
    dear = {**table.places["echo"], "aten.sin.default": 4.0}
    table = CostTable({**table.places, "echo": dear}, per_byte=0.0)
    inner = TagPartitioner(lambda node: tag_of(node) if "getitem" not in node.name else None)
    program = copied(branches)
    result = CostPartitioner.from_partitioner(table, inner).partition(program)
    on_host = {name for name, place in placed(program, result).items() if place == "host" and "getitem" not in name}
    assert {name.split("_")[1] for name in on_host} == {"relu", "sin"}
    assert {r.code for r in result.rejections} == {"cost"}
    assert all("with the 2 operators that stay together: 4 s there, 5 s on echo" in r.reason for r in result.rejections)
    assert all(node.meta.get("delegation_tag") not in ("first", "second") for node in program.graph.nodes)


def test_a_partitioner_that_breaks_is_named(branches: ExportedProgram) -> None:
    class Broken(TagPartitioner):
        def partition(self, exported_program: ExportedProgram) -> Any:
            raise ValueError("no")

    table = table_of(2.0, 1.0)
    with pytest.raises(PartitionerContractError, match="Partitioner Broken raised ValueError: no"):
        CostPartitioner.from_partitioner(table, Broken()).partition(copied(branches))

    class Lost(TagPartitioner):
        def partition(self, exported_program: ExportedProgram) -> Any:
            result = super().partition(exported_program)
            result.partition_tags.clear()
            return result

    with pytest.raises(PartitionerContractError, match="Partitioner Lost tagged aten_sin_default with 't'"):
        CostPartitioner.from_partitioner(table, Lost(by_operator("aten.sin.default"))).partition(copied(branches))


# -- tables and bad input ----------------------------------------------------------------------------------------------


def test_tables_round_trip(tmp_path: Path) -> None:
    table = CostTable(
        {"host": {"aten.mul.Tensor": 2e-6, "aten.add.Tensor": 1.5}, "echo": {"aten.add.Tensor(float32[1])": 0}},
        per_byte=1e-10,
        per_call={"echo": 1e-6},
        unit="cycles",
        default={"host": 3},
    )
    first = table.save(tmp_path / "a.json").read_bytes()
    assert CostTable.load(tmp_path / "a.json") == table
    turned = CostTable({"echo": table.places["echo"], "host": dict(reversed(table.places["host"].items()))}, 1e-10)
    turned = CostTable(turned.places, 1e-10, table.per_call, "cycles", table.default)
    assert turned.save(tmp_path / "b.json").read_bytes() == first


GOOD = {"format": "exir-lowering costs", "version": 1, "per_byte": 0, "places": {"host": {"aten.add.Tensor": 1}}}


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "cannot be read as JSON"),
        ("[]", "has the format None, version None"),
        (json.dumps({**GOOD, "version": 2}), "version 2; expected 'exir-lowering costs', version 1"),
        (json.dumps({**GOOD, "more": 1}), "has the entries more, per_byte, places; expected"),
        (json.dumps({"format": GOOD["format"], "version": 1, "per_byte": 1}), "has the entries per_byte; expected"),
        (json.dumps({**GOOD, "places": {"host": {"aten.add.Tensor": -1}}}), r"places\['host'\]\['aten.add.Tensor'\]"),
        (json.dumps({**GOOD, "places": {"host": {"aten.add.Tensor": float("nan")}}}), "is nan, expected a finite"),
        (json.dumps({**GOOD, "per_byte": float("inf")}), "per_byte is inf"),
        (json.dumps({**GOOD, "per_byte": "much"}), "per_byte is 'much'"),
        (json.dumps({**GOOD, "places": {"host": {"aten.add.Tensor": True}}}), "is True"),
        (json.dumps({**GOOD, "places": {"host": {"aten.add.Tensr": 1}}}), "Did you mean 'aten.add.Tensor'"),
        (json.dumps({**GOOD, "places": {"host": {"aten.ad(float32[1])": 1}}}), "Operator 'aten.ad' does not exist"),
        (json.dumps({**GOOD, "places": {"echo": {}}}), "'host' is missing"),
        (json.dumps({**GOOD, "places": []}), r"places is \[\], expected a mapping"),
        (json.dumps({**GOOD, "places": {"host": 3}}), r"places\['host'\] is 3"),
        (json.dumps({**GOOD, "per_call": {"echo": 1}}), "per_call names 'echo', expected some of none"),
        (json.dumps({**GOOD, "default": {"other": 1}}), "default names 'other', expected some of 'host'"),
        (json.dumps({**GOOD, "unit": 1}), "unit is 1"),
        (
            '{"format": "exir-lowering costs", "version": 1, "per_byte": 1' + "0" * 400 + ', "places": {"host": {}}}',
            "per_byte",
        ),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        CostTable.load(path)
    assert "table.json" in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        CostTable.load(tmp_path / "missing.json")
    with pytest.raises(InputError, match="cannot be written"):
        CostTable({"host": {}}, 0.0).save(tmp_path / "missing" / "a.json")


def test_unknown_operators_on_the_host_are_all_named(branches: ExportedProgram) -> None:
    table = CostTable({"host": {"aten.add.Scalar": 1, "aten.mul.Tensor": 1}, "echo": {}}, 0.0)
    with pytest.raises(InputError) as caught:
        CostPartitioner(table, {"echo": everything()}).partition(copied(branches))
    assert "aten.add.Tensor (it has aten.mul.Tensor and aten.add.Scalar)" in str(caught.value)
    assert "aten.sigmoid.default" in str(caught.value)
    assert "for aten.mul.Tensor" not in str(caught.value) and ", aten.mul.Tensor" not in str(caught.value)
    with_default = CostTable(table.places, 0.0, default={"host": 1.0})
    assert not CostPartitioner(with_default, {"echo": everything()}).partition(copied(branches)).partition_tags


def test_bad_arguments(branches: ExportedProgram) -> None:
    table = table_of(1.0, 1.0)
    with pytest.raises(InputError, match="no node_cost"):
        CostPartitioner({"host": 1}, {"echo": everything()})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="supports"):
        CostPartitioner(table, {})
    with pytest.raises(InputError, match="expected an ExecuTorch Partitioner"):
        CostPartitioner.from_partitioner(table, "xnnpack")  # type: ignore[arg-type]

    class Odd:
        unit, byte_cost = "s", 0.0

        def node_cost(self, node: Any, place: str) -> float:
            return float("nan")

        def call_cost(self, place: str) -> float:
            return 0.0

    with pytest.raises(InputError, match=r"node_cost\(aten_add_tensor \(aten.add.Tensor\), 'host'\) is nan"):
        CostPartitioner(Odd(), {"echo": everything()}).partition(copied(branches))
