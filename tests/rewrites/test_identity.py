"""Operators that change nothing are gone; what a method returns stays a value of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge
from rewriting_support import versions
from torch import nn
from torch.export import export

import exir_lowering
from exir_lowering import LoweringOptions
from exir_lowering.rewrites import Identity


class Apply(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.function(torch.relu(x)))


X = torch.randn(2, 3, 4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.expand(2, 3, 4),
        lambda x: x.clone(),
        lambda x: x.view(6, 4).view(2, 3, 4),
        lambda x: x.unsqueeze(1).view(2, 3, 4),
        lambda x: x.permute(1, 2, 0).permute(2, 0, 1),
        lambda x: x[:, 0:3],
        lambda x: x.to(torch.float32),
        lambda x: x.reshape(2, 3, 4),
        lambda x: torch.ops.aten.mul.Scalar(x, 1.0),
        lambda x: torch.ops.aten.copy(x * 2, x),
    ],
)
def test_identities_are_gone(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = versions(Apply(function), (X,), [Identity])
    assert found.after == ["aten.relu.default"] * 2
    found.check(X, exact=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.expand(5, 2, 3, 4),
        lambda x: x[:, 1:],
        lambda x: x[:, ::2],
        lambda x: x.permute(1, 2, 0).permute(1, 2, 0),
        lambda x: x.view(6, 4).view(3, 8),
        lambda x: x.to(torch.float64),
        lambda x: torch.ops.aten.mul.Scalar(x, -1.0),
        lambda x: x.to(torch.float64).to(torch.float32),
        lambda x: torch.ops.aten.copy(x * 2, x[:, :1]),
        lambda x: torch.ops.aten.copy(x.to(torch.int32), x),
    ],
)
def test_what_changes_something_stays(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = versions(Apply(function), (X,), [Identity])
    assert len(found.after) > 2
    found.check(X, exact=True)


class Returns(nn.Module):
    """Returns an input, a copy of it, a value twice, and the state before and after a write."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = self.state.clone()
        viewed = self.state.clone().view(3, 1)
        self.state.copy_(self.state + x)
        y = torch.relu(x)
        return x.clone(), y, y.clone(), y.expand(3), before, viewed, self.state.clone()


def test_what_is_returned_is_a_value_of_its_own() -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    found = versions(Returns(), (x,), ["safe"])
    eager = Returns()
    for turn in range(3):
        plain, rewritten = (one.run("forward", x * turn) for one in (found.plain, found.rewritten))
        for one, two, three in zip(plain, rewritten, eager(x * turn), strict=True):
            assert torch.equal(one, two) and torch.equal(two, three)


def test_sizes_that_are_known_only_when_it_runs() -> None:
    length = torch.export.Dim("length", min=2, max=9)
    found = versions(
        Apply(lambda x: x.permute(0, 2, 1).permute(0, 2, 1).expand(2, x.shape[1], 4)),
        (X,),
        [Identity],
        dynamic_shapes={"x": {1: length}},
    )
    assert found.after.count("aten.permute_copy.default") == found.after.count("aten.expand_copy.default") == 0
    for size in (2, 5, 9):
        found.check(torch.randn(2, size, 4), exact=True)


def test_channels_last_is_not_an_identity() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(torch.relu(x).to(memory_format=torch.channels_last))

    x = torch.randn(1, 3, 4, 4)
    found = versions(Model(), (x,), [Identity])
    assert any("dim_order" in name for name in found.after)
    found.check(x, exact=True)


def test_a_size_that_was_equal_at_export_is_not_equal() -> None:
    """The first dimension is 3 in the example, and what is cut out of it has 3 rows in any run."""

    class Cut(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.relu(torch.relu(x)[0:3]) + torch.relu(y)

    length = torch.export.Dim("length", min=3, max=9)
    found = versions(
        Cut(),
        (torch.randn(3, 4), torch.randn(3, 4)),
        ["safe"],
        dynamic_shapes={"x": {0: length}, "y": None},
    )
    for size in (3, 4, 9):
        found.check(torch.randn(size, 4), torch.randn(3, 4), exact=True)


def test_a_linear_layer_whose_result_is_flattened_stays_one() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.layer(x).view(-1, 6))

    model, x = Model().eval(), torch.randn(2, 3, 4)
    edge = to_edge(export(model, (x,))).exported_program()  # the layer is decomposed, with views around it
    lowered = exir_lowering.to_backend(
        {"forward": edge}, {"forward": XnnpackPartitioner()}, options=LoweringOptions(rewrites="safe")
    )
    (found,) = exir_lowering.load(lowered.emit().buffer).run("forward", x)
    torch.testing.assert_close(found, model(x))


def test_views_of_channels_last_are_not_joined() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).reshape(1, 8, -1).reshape(1, -1) * 2.0

    x = torch.randn(1, 3, 8, 8).to(memory_format=torch.channels_last)
    model = Model().to(memory_format=torch.channels_last)
    found = versions(model, (x,), [Identity])
    assert found.after.count("aten.view_copy.default") == found.before.count("aten.view_copy.default") == 2
