"""Partitions between processes: what is read is what was written, or nothing is."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import MODELS, exported
from quantized_models import quantized
from random_programs import random_programs
from torch import nn
from torch.export import Dim, ExportedProgram, export

from exir_lowering import LoweredMethods, LoweringOptions, graphs
from exir_lowering._upstream import transport
from exir_lowering.graphs.copies import list_tensors
from exir_lowering.model import BackendGroup, LoweredPartition, Partition
from exir_lowering.pipeline import lower_in
from exir_lowering.plugins.backend import Backend
from exir_lowering.steps.cache.keys import UNIMPORTANT, describe_partition
from exir_lowering.steps.preprocess import preprocess
from exir_lowering.steps.session import Session


def sent(program: ExportedProgram) -> ExportedProgram:
    """Return a program as another process would have it."""
    made = transport.loads(*transport.dumps(graphs.copy_program(program, kind=type(program)), UNIMPORTANT))
    return graphs.copy_program(made, kind=type(made))


def lowered(program: Any, partitioner: str, checked: list[Partition]) -> LoweredMethods:
    """Lower partitions that were sent, and are equal to those that were not."""

    def lower_sent(group: BackendGroup, backend: Backend, session: Session) -> list[LoweredPartition]:
        made = [replace(one, program=sent(one.program)) for one in group.partitions]
        for one, its in zip(made, group.partitions, strict=True):
            assert describe_partition(one, {}) == describe_partition(its, {})
            assert type(one.program) is type(its.program)
        checked.extend(made)
        return preprocess(BackendGroup(group.backend_id, tuple(made)), backend, session)

    return lower_in(Session(LoweringOptions()), program, partitioner, preprocess_group=lower_sent)


def check(program: Any, partitioners: Sequence[str] = ("xnnpack", "reference")) -> None:
    for partitioner in partitioners:
        checked: list[Partition] = []
        made = lowered(program, partitioner, checked)
        assert len(checked) == sum(len(method.partitions) for method in made.report.methods) > 0
        plain = lower_in(Session(LoweringOptions()), program, partitioner)
        assert made.emit().buffer == plain.emit().buffer


@pytest.mark.parametrize(
    "model", [one if one == "bert" else pytest.param(one, marks=pytest.mark.nightly) for one in MODELS]
)
def test_models(model: str) -> None:
    check(exported(model)[2])


@pytest.mark.parametrize("dynamic", [False, True])
def test_quantised_programs(dynamic: bool) -> None:
    check(quantized(dynamic))


class Sizes(nn.Module):
    """Has sizes that are symbolic, computed from such ones, and depend on data, and floats of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
        both = torch.cat([self.linear(x), y, x])
        rows = both.shape[0]
        shares = torch.full((rows, 2), 0.5), x * (x.shape[0] / 3), self.linear(x).nonzero().relu()
        return both[1:].relu(), both.reshape(rows * 2, 4), rows // 2 + 1, *shares


@pytest.mark.parametrize("strict", [False, True])
def test_symbolic_sizes(strict: bool) -> None:
    shapes = {"x": {0: Dim("b", min=3, max=60)}, "y": {0: Dim("c", min=2)}}
    check(export(Sizes(), (torch.randn(5, 8), torch.randn(4, 8)), dynamic_shapes=shapes, strict=strict))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.mean() > 1, torch.sin, lambda x: x * float("inf"), (x,))

        return torch.cond(x.sum() > 0, lambda x: inner(x @ self.weight), lambda x: x.cos(), (x,))


def test_nested_graphs() -> None:
    check(export(Branches(), (torch.randn(3, 4),)), ["reference"])


def test_random_programs() -> None:
    for program in random_programs(0, 2):
        lowered(program.methods, "reference", [])


def linear() -> ExportedProgram:
    return export(nn.Linear(2, 2), (torch.zeros(1, 2),))


def test_tensors_share_memory_as_before_and_only_what_they_span_is_sent() -> None:
    memory = torch.arange(1 << 16, dtype=torch.float32)
    program = linear()
    parts = {
        "first": memory[10:22].view(3, 4),
        "second": memory[14:30].view(4, 4).t(),
        "empty": torch.zeros(0, 4),
        "weight": nn.Parameter(torch.randn(4, 4), requires_grad=False),
        "half": torch.randn(3).half().requires_grad_(True),
    }
    program.state_dict.update(parts, tied=parts["weight"])
    content, saved = transport.dumps(graphs.copy_program(program), UNIMPORTANT)
    assert len(saved) < 10_000
    made = transport.loads(content, saved).state_dict
    for name, tensor in program.state_dict.items():
        assert torch.equal(made[name], tensor) and type(made[name]) is type(tensor) and made[name].dtype is tensor.dtype
        assert made[name].stride() == tensor.stride() and made[name].requires_grad == tensor.requires_grad
    assert made["tied"] is made["weight"]
    made["first"][2, 3] = -1
    assert made["second"].t()[1, 3] == -1 and memory.min() == 0


def test_a_function_of_a_script_is_only_its_name_elsewhere() -> None:
    program = linear()
    next(iter(program.graph.nodes)).meta["mine"] = lambda: 1
    assert isinstance(next(iter(sent(program).graph.nodes)).meta["mine"], str)


@pytest.mark.parametrize("value", [torch.channels_last, torch.per_channel_affine])
def test_no_module_of_a_user_is_named(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickle looks for what has no module in the first that has its name: who imports torch comes before torch."""
    program, first = linear(), types.ModuleType("mine")
    next(iter(program.graph.nodes)).meta["mine"] = [value]
    first.__dict__.update(vars(torch), torch=torch)
    monkeypatch.setattr(sys, "modules", {"mine": first, **sys.modules})
    with pytest.raises(pickle.PicklingError, match="mine"):
        pickle.dumps(value)
    content, pieces = transport.dumps(graphs.copy_program(program), UNIMPORTANT)
    monkeypatch.undo()
    assert next(iter(transport.loads(content, pieces).graph.nodes)).meta["mine"] == [value]


def test_a_program_is_not_changed() -> None:
    program = linear()
    before = str(program), [tensor.data_ptr() for tensor in list_tensors([program])]
    sent(program)
    assert before == (str(program), [tensor.data_ptr() for tensor in list_tensors([program])])
