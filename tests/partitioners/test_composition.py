"""Partitioners inside of partitioners: what the outer one decided holds, whatever the inner one does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir.backend import utils
from lowering_support import NoopBackend, TagPartitioner, edge_program
from torch.export import ExportedProgram, export

import exir_lowering
from exir_lowering import (
    DelegationSpec,
    Partitioner,
    PartitionerContractError,
    PartitionResult,
)
from exir_lowering.partitioners import (
    ChainedPartitioner,
    Limits,
    Pattern,
    PatternSupport,
    RuledPartitioner,
    SupportPartitioner,
    allow,
    convex_proposals,
    deny,
    everything,
    ops,
    pin,
)


class Wave(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(torch.sin(torch.relu(x)))


class Branches(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: torch.sin(x) + 1, lambda x: torch.cos(x) - 1, (x,))


class Copying(Partitioner):
    """Tags a copy of the program, as some of ExecuTorch's partitioners do."""

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        copied = copy.deepcopy(exported_program)
        for node in copied.graph.nodes:
            if node.op == "call_function":
                node.meta["delegation_tag"] = "all"
        return PartitionResult(copied, {"all": DelegationSpec("echo", [])})


def homes(partitioner: Any, module: torch.nn.Module | None = None) -> dict[str, str | None]:
    program = export((module or Wave()).eval(), (torch.ones(4),))
    (method,) = exir_lowering.plan(program, partitioner).methods
    backends: dict[str | None, str] = {p.id: p.backend_id for p in method.partitions}
    return {
        n.operator.split(".")[1] if "." in n.operator else n.operator: backends.get(n.partition) for n in method.nodes
    }


# -- what is denied stays denied ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inner",
    [
        SupportPartitioner({"echo": everything()}),
        TagPartitioner(lambda node: "t"),
        Copying(),
    ],
    ids=["everything", "tags all", "copies"],
)
def test_deny_and_pin_hold_against_any_partitioner(inner: Partitioner) -> None:
    assert homes(RuledPartitioner(inner, deny(op="aten.sin"))) == {"relu": "echo", "sin": None, "cos": "echo"}
    assert homes(RuledPartitioner(inner, pin("Npu", op="aten.sin"))) == {"relu": "echo", "sin": "Npu", "cos": "echo"}
    chain = ChainedPartitioner(
        SupportPartitioner({"Npu": ops("aten.sin")}), inner, backends={"Npu": NoopBackend(), "echo": NoopBackend()}
    )
    assert homes(chain) == {"relu": "echo", "sin": "Npu", "cos": "echo"}


def test_what_was_decided_inside_of_a_graph_keeps_its_call_on_the_host() -> None:
    whole = SupportPartitioner({"A": ops("cond")})
    found = homes(RuledPartitioner(whole, deny(op="aten.sin")), Branches())
    assert (found["cond"], found["sin"]) == (None, None)
    chain = ChainedPartitioner(
        SupportPartitioner({"B": ops("aten.sin")}), whole, backends={"A": NoopBackend(), "B": NoopBackend()}
    )
    found = homes(chain, Branches())
    assert (found["cond"], found["sin"]) == (None, "B")
    program = export(Branches().eval(), (torch.ones(4),))
    (method,) = exir_lowering.plan(program, chain).methods
    reason = next(h.reason for h in method.host if h.operator == "cond")
    assert "it calls a graph with " in reason and ", whose destination was decided before" in reason


def test_deny_reaches_what_an_operator_was_decomposed_to() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(x) + x)

    program = export(Two().eval(), (torch.ones(2, 4),))
    lowered = exir_lowering.lower(program, RuledPartitioner(XnnpackPartitioner(), deny(op="aten.linear")))
    host = {node.operator for node in lowered.report.methods[0].host}
    assert host == {"aten.permute_copy.default", "aten.addmm.default"}


def test_an_allowed_operator_goes_to_the_partitioners_backend_also_beside_a_pin() -> None:
    inner = SupportPartitioner({"echo": ops("aten.relu")})
    rules = [pin("Npu", op="aten.sin"), allow(op="aten.cos")]
    for order in (rules, rules[::-1]):
        assert homes(RuledPartitioner(inner, *order)) == {"relu": "echo", "sin": "Npu", "cos": "echo"}


# -- state -------------------------------------------------------------------------------------------------------------


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.sum(0))
        return torch.cumsum(x + self.total, 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RuledPartitioner(XnnpackPartitioner(), pin("XnnpackBackend", op="aten.add")),
        lambda: ChainedPartitioner(XnnpackPartitioner()),
        lambda: SupportPartitioner({"XnnpackBackend": ops("aten.add")}),
    ],
    ids=["rules", "chain", "support"],
)
def test_a_backend_without_state_gets_no_state(make: Callable[[], Partitioner]) -> None:
    program = export(Counter().eval(), (torch.ones(3, 4),))
    lowered = exir_lowering.lower(program, make())
    assert lowered["forward"].graph_signature.buffers_to_mutate
    runs = exir_lowering.load(lowered.emit().buffer)
    model = Counter().eval()
    for _ in range(3):
        (got,) = runs.run("forward", torch.ones(3, 4))
        torch.testing.assert_close(got, model(torch.ones(3, 4)))


# -- groups ------------------------------------------------------------------------------------------------------------


def test_a_group_is_its_backends_own() -> None:
    """X takes the add, so the pattern of Y is not whole; what X takes stays with X."""

    class Gate(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            return y * torch.sigmoid(y)

    def gate(x: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        y = torch.ops.aten.add.Tensor(x, one)
        return torch.ops.aten.mul.Tensor(y, torch.ops.aten.sigmoid.default(y))

    pattern = PatternSupport(Pattern(gate))
    assert homes(SupportPartitioner({"Y": pattern, "X": ops("aten.add")}), Gate())["add"] == "Y"
    found = homes(SupportPartitioner({"X": ops("aten.add"), "Y": pattern}), Gate())
    assert (found["add"], found["sigmoid"], found["mul"]) == ("X", None, None)


# -- plan and lower ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: RuledPartitioner(SupportPartitioner({"echo": everything()}), deny(op="aten.sin")),
        lambda: ChainedPartitioner("nobody", SupportPartitioner({"echo": ops("aten.sin", "aten.cos")})),
        lambda: SupportPartitioner({"echo": everything()}, limits=Limits(max_nodes=2, min_nodes=2)),
        lambda: SupportPartitioner({"echo": ~ops("aten.sin")}, keep_apart=True),
    ],
    ids=["rules", "chain", "limits", "apart"],
)
@pytest.mark.parametrize("module", [Wave(), Branches()], ids=["wave", "branches"])
def test_lower_does_what_plan_says(make: Callable[[], Partitioner], module: torch.nn.Module) -> None:
    program = export(module.eval(), (torch.ones(4),))
    plan, lowered = (run(program, make()) for run in (exir_lowering.plan, exir_lowering.lower))
    assert lowered.report.methods == plan.methods
    assert all(node.reasons for node in plan.methods[0].host)
    torch.testing.assert_close(lowered["forward"].module()(torch.ones(4)), module(torch.ones(4)))


# -- whose mistake it is -----------------------------------------------------------------------------------------------


class Boom(TagPartitioner):
    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        raise ValueError("boom")


class Odd(TagPartitioner):
    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        result = super().partition(exported_program)
        result.rejections = ("x",)
        return result


class Lost(TagPartitioner):
    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        return PartitionResult(super().partition(exported_program).tagged_exported_program, {})


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: RuledPartitioner(inner, deny(op="aten.sin")),
        ChainedPartitioner,
    ],
    ids=["rules", "chain"],
)
@pytest.mark.parametrize(
    ("inner", "said"),
    [
        (Boom(), "Partitioner Boom raised ValueError: boom"),
        (Odd(), "Partitioner Odd returned rejections=\\('x',\\)"),
        (Lost(), "Partitioner Lost tagged .* with 't', but partition_tags has no destination"),
    ],
    ids=["raises", "odd rejections", "lost tag"],
)
def test_the_inner_partitioner_is_named(wrap: Callable[[Partitioner], Partitioner], inner: Any, said: str) -> None:
    program = export(Wave().eval(), (torch.ones(4),))
    with pytest.raises(PartitionerContractError, match=said):
        exir_lowering.plan(program, wrap(inner))


# -- threads -----------------------------------------------------------------------------------------------------------


def test_threads_do_not_wait_for_each_other_and_hear_their_own() -> None:
    program = edge_program(Wave(), (torch.ones(4),))
    before = utils.WhyNoPartition.__call__
    with convex_proposals(), ThreadPoolExecutor(4) as pool:
        partitioners = [SupportPartitioner({"Npu": ops("aten.sin")}), XnnpackPartitioner()] * 4
        plans = list(pool.map(lambda partitioner: exir_lowering.plan(program, partitioner), partitioners))
    assert plans[0::2] == [plans[0]] * 4 and plans[1::2] == [plans[1]] * 4
    assert utils.WhyNoPartition.__call__ is before
