"""Rewrites of "safe" ask the target: a partitioner gets those that its backend is said, or known, to gain from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from torch import nn
from torch.export import ExportedProgram, export

from exir_lowering import LoweringOptions, PartitionerContractError, load, lower, plan
from exir_lowering.partitioners import ChainedPartitioner, RuledPartitioner, SupportPartitioner, deny, everything, ops


class Attention(nn.Module):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.norm, self.packed, self.out = nn.LayerNorm(size), nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.packed(self.norm(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2)
        return self.out(torch.sin(mixed)) * 1.0


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    torch.manual_seed(0)
    return export(Attention().eval(), (torch.randn(1, 4, 16),))


def applied(program: ExportedProgram, partitioners: Any, rewrites: Any = None) -> set[str]:
    (method,) = plan(program, partitioners, options=LoweringOptions(rewrites=rewrites)).methods
    return {one.rewrite for one in method.rewritings}


def npu(taking: Any = None, rewrites: Any = None) -> SupportPartitioner:
    return SupportPartitioner({"reference": everything() if taking is None else taking}, rewrites=rewrites)


def test_a_backend_that_nobody_measured_gets_simpler_programs_only(program: ExportedProgram) -> None:
    assert applied(program, npu()) == {"identity"}
    (method,) = plan(program, npu()).methods
    (refused,) = (one for one in method.refused_rewrites if one.rewrite == "safe-softmax")
    assert refused.reason.startswith("SupportPartitioner takes this, and does not say that its backend gains")
    assert "safe-softmax" in refused.advice


def test_it_says_what_it_gains_from(program: ExportedProgram) -> None:
    assert applied(program, npu(rewrites={"identity", "safe-softmax"})) == {"identity", "safe-softmax"}
    assert applied(program, npu(rewrites=())) == set()
    assert applied(program, npu(rewrites={"safe"})) == {"identity", "safe-softmax"}


def test_what_the_user_chooses_singly_is_applied(program: ExportedProgram) -> None:
    assert applied(program, npu(rewrites=()), ["identity", "safe-softmax"]) == {"identity", "safe-softmax"}
    assert "safe-softmax" in applied(program, npu(), ["safe", "safe-softmax"])
    assert "safe-softmax" not in applied(program, npu(), ["safe"])


def test_the_host_gains_from_them_where_no_partitioner_takes_the_nodes(program: ExportedProgram) -> None:
    linear = ops("aten.addmm")
    assert "safe-softmax" in applied(program, npu(linear)) & applied(program, None)
    # Forms that pay in a backend do not: nobody measured this one.
    assert "pieces" not in applied(program, npu(linear))


def test_each_of_several_targets_gets_its_own(program: ExportedProgram) -> None:
    linear = npu(ops("aten.addmm"))
    assert {"safe-softmax", "pieces"} <= applied(program, [linear, "xnnpack"])
    assert "safe-softmax" not in applied(program, [npu(), "xnnpack"])
    assert "safe-softmax" in applied(program, ["xnnpack", npu(ops("aten.sin"))])


@pytest.mark.parametrize("wrap", [ChainedPartitioner, lambda one: RuledPartitioner(one, deny(op="aten.sin"))])
def test_who_does_less_than_another_one_gains_from_the_same(program: ExportedProgram, wrap: Any) -> None:
    assert "safe-softmax" not in applied(program, wrap(RuledPartitioner(npu(), deny(op="aten.sin"))))
    assert "safe-softmax" in applied(program, wrap(XnnpackPartitioner()))


def test_results_are_the_same(program: ExportedProgram) -> None:
    inputs = (torch.randn(1, 4, 16),)
    taking = SupportPartitioner({"reference": everything()})
    (output,) = load(lower(program, taking).emit().buffer).run("forward", *inputs)
    torch.testing.assert_close(output, program.module()(*inputs))


@pytest.mark.parametrize("said", ["safe", 3, [Attention]])
def test_what_is_no_set_of_names_is_an_error(program: ExportedProgram, said: Any) -> None:
    with pytest.raises(PartitionerContractError, match=r"SupportPartitioner: its attribute rewrites is .*, expected"):
        plan(program, npu(rewrites=said))
