"""Weights that are written in unusual ways, or lie in unusual places, with XNNPACK, which packs them."""

import torch
from compile_support import assert_near, clean, compiled, delegated
from torch import nn

from exir_lowering.backends.xnnpack import xnnpack

__all__ = ["clean"]


def test_signs_of_a_large_weight_are_changed_behind_the_back_of_autograd() -> None:
    model = nn.Linear(256, 256).eval()
    function, x = compiled(model, partitioners=xnnpack()), torch.randn(2, 256)
    with torch.no_grad():
        assert_near(function(x), model(x))
        model.weight.data[:, 1::2].neg_()
        assert_near(function(x), model(x))
    assert set(delegated()) == {"XnnpackBackend"}


class Flat(nn.Module):
    """Its weights are parts of one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flat", torch.randn(2, 16, 16) / 4)
        self.first, self.second = nn.Parameter(self.flat[0]), nn.Parameter(self.flat[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(torch.relu(nn.functional.linear(x, self.first)), self.second)


def test_weights_are_parts_of_one_buffer() -> None:
    model = Flat()
    function, x = compiled(model, partitioners=xnnpack()), torch.randn(2, 16)
    with torch.no_grad():
        assert_near(function(x), model(x))
        model.flat.mul_(-2)
        assert_near(function(x), model(x))
    assert set(delegated()) == {"XnnpackBackend"}
