"""Weights that are written in unusual ways, or lie in unusual places, with XNNPACK, which packs them."""

from __future__ import annotations

import gc
import weakref

import pytest
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


@pytest.mark.parametrize("how", ["sample", "content", "frozen"])
def test_what_each_check_sees(how: str) -> None:
    model = nn.Linear(256, 256).eval()
    function, x = compiled(model, partitioners=xnnpack(), check_weights=how), torch.randn(2, 256)
    with torch.no_grad():
        packed = function(x)
        # One element, which torch does not count and no sample has: the second word of the memory.
        model.weight.data[0, 2] += 100
        assert_near(function(x), model(x) if how == "content" else packed)
        model.weight.data.neg_()  # all of them, not counted either
        assert_near(function(x), packed if how == "frozen" else model(x))
        model.weight.mul_(2)  # counted
        assert_near(function(x), packed if how == "frozen" else model(x))
        model.load_state_dict(
            {name: torch.randn_like(value) for name, value in model.state_dict().items()}, assign=True
        )
        assert_near(function(x), model(x))  # they lie elsewhere


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_weights_that_were_replaced_are_let_go(dynamic: bool, grad: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    function = compiled(model, partitioners="xnnpack", dynamic=dynamic)
    with torch.set_grad_enabled(grad):
        for count in (3, 5):
            function(torch.randn(count, 16))
        memory = [weakref.ref(weight.untyped_storage()) for weight in model.parameters()]
        weights = [weakref.ref(weight) for weight in model.parameters()]
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)
        gc.collect()
        assert not any(one() is not None for one in (*weights, *memory))
        for count in (3, 5, 3):
            x = torch.randn(count, 16)
            assert_near(function(x), model(x))
