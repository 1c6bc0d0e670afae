"""Equal calls are computed once; random ones, and those with effects, each time."""

from __future__ import annotations

import torch
from executorch.exir import EdgeCompileConfig
from quantized_models import quantize
from rewriting_support import versions
from torch import nn

import exir_lowering
from exir_lowering import LoweringOptions
from exir_lowering.rewrites import CommonSubexpressions

X = torch.randn(2, 3)


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = torch.exp(torch.sin(x)), torch.exp(torch.sin(x))
        return one + two * 1 + torch.exp(torch.cos(x)) + torch.amax(x, 0) + torch.amax(x, 1)[:, None]


def test_equal_chains_are_one() -> None:
    found = versions(Model(), (X,), [CommonSubexpressions])
    assert found.before.count("aten.sin.default") == 2 and found.after.count("aten.sin.default") == 1
    assert found.after.count("aten.exp.default") == 2 and found.after.count("aten.amax.default") == 2
    found.check(X, exact=True)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.norm(x), self.norm(x), torch.max(x, 0)[0], torch.max(x, 0)[1]


def test_results_that_are_returned_stay_apart() -> None:
    """One result of an operator with several is returned twice; two of them are not."""
    found = versions(Twice().eval(), (X,), [CommonSubexpressions])
    assert found.after.count("aten._native_batch_norm_legit_no_training.default") == 2
    assert found.after.count("aten.max.dim") == 1
    found.check(X, exact=True)
    program = exir_lowering.load(
        exir_lowering.lower(torch.export.export(Twice().eval(), (X,)), "xnnpack").emit().buffer
    )
    assert torch.equal(*program.run("forward", X)[:2])


class Numbers(nn.Module):
    """Numbers that compare as equal, but are not."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        full = torch.full
        return full((2,), 1), full((2,), True), full((2,), 1.0), full((1,), 0.0) / x, full((1,), -0.0) / x


def test_numbers_are_compared_with_their_types_and_signs() -> None:
    x = torch.ones(1)
    found = versions(Numbers(), (x,), [CommonSubexpressions])
    for plain, rewritten in zip(*(one.run("forward", x) for one in (found.plain, found.rewritten)), strict=True):
        assert plain.dtype is rewritten.dtype and torch.equal(plain, rewritten)
        assert torch.equal(torch.signbit(plain.float()), torch.signbit(rewritten.float()))


class Random(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bernoulli(x) - torch.bernoulli(x)


def test_random_numbers_are_drawn_each_time() -> None:
    program = torch.export.export(Random(), (X,))
    config = EdgeCompileConfig(_check_ir_validity=False)
    plain, safe = (
        exir_lowering.lower(program, options=LoweringOptions(edge_compile_config=config, rewrites=chosen))
        for chosen in ("none", "safe")
    )
    assert not safe.report.methods[0].rewritings
    assert len(plain["forward"].graph.nodes) == len(safe["forward"].graph.nodes)


class Branches(nn.Module):
    """Linear layers with one input, whose dequantised value is one for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x) for layer in self.layers)  # type: ignore[return-value]


def test_quantised_patterns_are_not_shared() -> None:
    x = torch.randn(2, 16)
    for dynamic in (False, True):
        program = quantize(Branches(), (x,), dynamic=dynamic)
        plain, safe = (
            exir_lowering.lower(program, "xnnpack", options=LoweringOptions(rewrites=chosen))
            for chosen in ("none", "safe")
        )
        one, two = (exir_lowering.load(each.emit().buffer).run("forward", x)[0] for each in (plain, safe))
        assert torch.equal(one, two)
        counts = [len(each.report.methods[0].partitions) for each in (plain, safe)]
        assert counts[1] <= counts[0]


class Found(nn.Module):
    """Two calls whose sizes depend on data have symbols of their own."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.flatten().nonzero().sum(), (x.flatten().nonzero() + 1).sum(), x.flatten() * 2


def test_sizes_that_depend_on_data_are_not_known_to_be_equal() -> None:
    found = versions(Found(), (X,), [CommonSubexpressions])
    assert found.before.count("aten.view_copy.default") == 3 and found.after.count("aten.view_copy.default") == 1
    assert found.after.count("aten.nonzero.default") == 2
