"""Regions, attention with functions, checkpoints with dropout, loops: only what cannot be lowered stays in PyTorch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_support import assert_near, clean, compiled, reasons
from torch._higher_order_ops.while_loop import while_loop
from torch.compiler import nested_compile_region
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from exir_lowering.dynamo import in_pytorch, reports

__all__ = ["clean"]


@nested_compile_region
def region(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return dropout(torch.tanh(x @ weight), 0.25)


class Model(torch.nn.Module):
    """A weight, and one kind of call between what is lowered before and after it."""

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x @ self.weight).sin()
        for _ in range(2):
            x = self.call(x * 2, self.weight) + dropout(x, 0.5)
        return x.cos() @ self.weight


def checkpointed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda value: dropout(torch.tanh(value @ weight), 0.5), x, use_reentrant=False)


def looped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    number, result = while_loop(lambda n, y: n < 3, lambda n, y: (n + 1, (y @ weight).tanh()), (torch.tensor(0), x))
    return result + number


def bias(score: torch.Tensor, batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return score + (query - key)


def attended(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    values = x.reshape(1, 1, -1, 4)
    return flex_attention(values, values @ weight, values, score_mod=bias).reshape(x.shape)


def _run(function: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Call a function twice with one seed; return results and gradients, if there are any, and the next number."""
    torch.manual_seed(7)
    found = []
    for _ in range(2):
        result = function(x)
        found.append(result)
        if result.requires_grad:
            found += torch.autograd.grad(result.square().sum(), [x])
    return [*found, torch.rand(3)]


def _operators() -> tuple[int, int]:
    methods = [method for report in reports() for _, one in report.reports for method in one.methods]
    return sum(method.delegated for method in methods), sum(len(method.nodes) for method in methods)


@pytest.mark.parametrize(("partitioners", "dynamic"), [("reference", False), ("xnnpack", True)])
@pytest.mark.parametrize("call", [region, checkpointed])
def test_training_equals_eager(call: Any, partitioners: str, dynamic: bool) -> None:
    model = Model(call)
    called = compiled(model, partitioners=partitioners, dynamic=dynamic, fullgraph=True)
    with torch._dynamo.config.patch(inline_invoke_subgraph=True):  # else regions stay in PyTorch
        for size in (3, 5):
            x = torch.randn(size, 4, requires_grad=True)
            assert_near(_run(called, x), _run(model, x))
    assert not reasons()
    if partitioners == "reference":
        delegated, total = _operators()
        assert total > delegated >= total - 12  # dropout's random numbers: two in the region or checkpoint, two outside


@pytest.mark.parametrize(("partitioners", "dynamic"), [("reference", False), ("xnnpack", True)])
@pytest.mark.parametrize("call", [region, checkpointed, looped, attended])
def test_inference_equals_eager_and_sees_weights(call: Any, partitioners: str, dynamic: bool) -> None:
    model = Model(call)
    called = compiled(model, partitioners=partitioners, dynamic=dynamic, fullgraph=True)
    with torch.no_grad():
        for size in (3, 5):
            x = torch.randn(size, 4)
            assert_near(_run(called, x), _run(model, x))
            model.weight.mul_(0.9)
    assert _operators()[0] > 0


def test_the_report_lists_what_stays_and_it_ends_with_the_function() -> None:
    gc.collect()
    before = len(in_pytorch._calls)
    called = compiled(Model(looped), partitioners="reference")
    with torch.no_grad():
        called(torch.randn(3, 4))
    (method,) = reports()[0].reports[0][1].methods
    assert [node.operator for node in method.host].count("exir_lowering_dynamo.in_pytorch.default") == 2
    assert len(in_pytorch._calls) == before + 2
    del called
    torch._dynamo.reset()
    gc.collect()
    assert len(in_pytorch._calls) == before
