"""Means over the last dimensions become global average poolings."""

from __future__ import annotations

import pytest
import torch
from rewriting_support import always, versions

from exir_lowering.rewrites import Reductions

INF, NAN = float("inf"), float("nan")
VIEW = "aten.view_copy.default"


class Mean(torch.nn.Module):
    def __init__(self, dims: list[int], keepdim: bool) -> None:
        super().__init__()
        self.dims, self.keepdim = dims, keepdim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(self.dims, self.keepdim)


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((5,), [0]),
        ((3, 5), [-1]),
        ((2, 3, 5), [2]),
        ((2, 3, 5), [1, 2]),
        ((2, 3, 5), [-1, 0, 1]),
        ((2, 3, 4, 5), [-1]),
        ((2, 3, 4, 5), [2, 3]),
        ((1, 1, 1, 1), [3]),
        ((2, 1, 3, 2, 5), [-1]),
    ],
)
def test_last_dimensions(shape: tuple[int, ...], dims: list[int], keepdim: bool) -> None:
    for partitioners in (None, "xnnpack"):
        found = versions(Mean(dims, keepdim), (torch.randn(shape),), [always(Reductions)], partitioners=partitioners)
        found.check(torch.randn(shape))
        if partitioners is None:
            assert (VIEW in found.after) is not (len(shape) == 4 and len(dims) == 2 and keepdim)
            for odd in (INF, -INF, NAN, 3e38, -0.0, 1e-45):
                x = torch.randn(shape)
                x.view(-1)[-1] = odd
                found.check(x)
                found.check(torch.full(shape, odd))
        else:
            assert not found.after or not any("mean" in name for name in found.after)


@pytest.mark.parametrize(
    ("x", "dims"),
    [
        (torch.randn(2, 3, 5), [1]),
        (torch.randn(2, 3, 5), [0, 2]),
        (torch.randn(2, 3, 5).half(), [2]),
        (torch.randn(2, 3, 5).double(), [2]),
        (torch.randn(2, 0), [1]),
        (torch.randn(0, 2), [1]),
        (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), [3]),
    ],
)
def test_left_alone(x: torch.Tensor, dims: list[int]) -> None:
    found = versions(Mean(dims, True), (x,), [always(Reductions)])
    assert found.before == found.after


def test_sizes_known_at_runtime() -> None:
    shapes = {"x": {0: torch.export.Dim("n", min=1, max=9)}}
    for keepdim in (True, False):
        found = versions(Mean([-1], keepdim), (torch.randn(3, 2, 4),), [always(Reductions)], dynamic_shapes=shapes)
        assert VIEW in found.after
        for size in (1, 9):
            found.check(torch.randn(size, 2, 4))
    shapes = {"x": {1: torch.export.Dim("n", min=1, max=9)}}
    found = versions(Mean([-1], True), (torch.randn(3, 2),), [always(Reductions)], dynamic_shapes=shapes)
    assert found.before == found.after
