"""The step as a whole: in every graph, method and size; a backend comes first, and what is right stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.exir.backend.partitioner import Partitioner, PartitionResult
from lowering_support import snapshot
from torch.export import Dim, export

import exir_lowering
from exir_lowering import InputError, LoweringOptions, lower

F = torch.nn.functional
WHOLE = torch.arange(-9, 9)


class Ring(torch.nn.Module):
    """A cache that is written at a place modulo its length, and read in order: state and remainders."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.index_copy_(0, self.place % 4, x)
        self.place.sub_(3)
        return self.kept[(self.place - torch.arange(4)) % 4]


class Branches(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(
            x.sum() > 0, lambda t: (t % 3) * 2, lambda t: torch.cond(t[0] > 0, _ordered, _halved, (t,)), (x,)
        )


def _ordered(t: torch.Tensor) -> torch.Tensor:
    return t.sort().values


def _halved(t: torch.Tensor) -> torch.Tensor:
    return t // 2


class Called(torch.nn.Module):
    def __init__(self, function: Callable[..., Any], *modules: torch.nn.Module) -> None:
        super().__init__()
        self.function, self.kept = function, torch.nn.ModuleList(modules)

    def forward(self, *given: torch.Tensor) -> Any:
        return self.function(*given, *self.kept)


def run(lowered: Any, method: str, *given: torch.Tensor) -> list[torch.Tensor]:
    return exir_lowering.load(lowered.emit().buffer).run(method, *given)


@pytest.mark.parametrize("fast", [True, False])
def test_state_in_several_calls(fast: bool) -> None:
    program = export(Ring(), (torch.ones(1),))
    loaded = exir_lowering.load(lower(program, options=LoweringOptions(fast=fast)).emit().buffer)
    eager = Ring()
    for number in range(7):
        x = torch.full((1,), float(number))
        assert torch.equal(loaded.run("forward", x)[0], eager(x))


@pytest.mark.parametrize("partitioner", [None, "xnnpack"])
def test_branches_and_several_methods(partitioner: str | None) -> None:
    programs = {"branches": export(Branches(), (WHOLE,)), "ring": export(Ring(), (torch.ones(1),))}
    before = {name: snapshot(program) for name, program in programs.items()}
    lowered = lower(programs, partitioner)
    assert {name: snapshot(program) for name, program in programs.items()} == before
    for x in (WHOLE, WHOLE + 40, -WHOLE, torch.arange(18).flip(0) - 9):
        assert torch.equal(run(lowered, "branches", x)[0], Branches()(x))
    assert {one.operator for one in lowered.report.methods[0].legalized} >= {
        "aten.remainder.Scalar",
        "aten.sort.default",
    }


DYNAMIC: list[tuple[Callable[..., Any], tuple[int, ...]]] = [
    (lambda x: x.sort(1, descending=True), (3, 7)),
    (lambda x: F.layer_norm(x, (7,)), (3, 7)),
    (lambda x: F.group_norm(x, 2), (3, 4, 5)),
    (lambda x: F.pad(x, (-1, 2)), (3, 7)),
    (lambda x: x.cummax(0), (3, 7)),
    (lambda x: (x * 9).long() % 4, (3, 7)),
    (lambda x: F.max_pool2d(x, 2), (3, 2, 6, 6)),
]


@pytest.mark.parametrize(("function", "shape"), DYNAMIC)
def test_dynamic_sizes_stay_dynamic(function: Callable[..., Any], shape: tuple[int, ...]) -> None:
    batch = Dim("batch", min=1, max=9)
    program = export(Called(function), (torch.randn(shape),), dynamic_shapes=(({0: batch},),))
    lowered = lower(program)
    assert all(one.converted == (2, 9) for one in lowered.report.narrowed)  # 2 is torch's own least size
    assert lowered.report.methods[0].legalized
    loaded = exir_lowering.load(lowered.emit().buffer)
    for size in (1, 2, 5, 9):
        x = torch.randn(size, *shape[1:])
        expected = torch.utils._pytree.tree_leaves(function(x))
        for got, wanted in zip(loaded.run("forward", x), expected, strict=True):
            torch.testing.assert_close(got, wanted)


def test_what_is_made_is_offered_to_the_partitioners() -> None:
    """A convolution over three dimensions, which no kernel and no backend takes, becomes products of XNNPACK's."""
    program = export(torch.nn.Conv3d(2, 3, 3).eval(), (torch.randn(1, 2, 5, 5, 5),))
    lowered = lower(program, "xnnpack")
    assert lowered.report.methods[0].partitions
    x = torch.randn(1, 2, 5, 5, 5)
    torch.testing.assert_close(run(lowered, "forward", x)[0], program.module()(x), atol=1e-5, rtol=1e-5)


def test_nothing_is_changed_where_all_is_right() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4))
    for partitioner in (None, "xnnpack"):
        lowered = lower(export(model.eval(), (torch.randn(1, 3, 8, 8),)), partitioner)
        assert not lowered.report.methods[0].legalized


def test_what_a_rule_does_not_cover_is_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match=r"aten\.sort\.default: .*no kernel.*does not cover"):
        lower(export(Called(lambda x: x.sort()), (torch.randn(1 << 14),)))
    for nothing in (lambda x: x.shape[0], lambda x: x.sum().item()):
        with pytest.raises(InputError, match="no tensor, which a file cannot"):
            lower(export(Called(nothing), (torch.randn(3),)))


def test_what_a_partitioner_keeps_whole_and_does_not_take_runs_on_the_host() -> None:
    class Keeps(Partitioner):
        def ops_to_not_decompose(self, program: Any) -> Any:
            return [torch.ops.aten.linear.default, torch.ops.aten.hardswish.default], None

        def partition(self, exported_program: Any) -> PartitionResult:
            return PartitionResult(exported_program, {})

    x, layer = torch.randn(2, 4), torch.nn.Linear(4, 4)
    lowered = lower(export(Called(lambda x, layer: F.hardswish(layer(x)), layer), (x,)), Keeps())
    torch.testing.assert_close(run(lowered, "forward", x)[0], F.hardswish(layer(x)))
