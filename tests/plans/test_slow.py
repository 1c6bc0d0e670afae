"""A plan names what is slow on the host, with its lines, and what helps; nothing else is called slow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchao.quantization as quantization
from torch.export import export
from torchao.quantization.granularity import PerAxis

from exir_lowering import plan
from exir_lowering.plans.findings import Finding, find


class Net(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, width: int = 128) -> None:
        super().__init__()
        self.layer, self.image = torch.nn.Linear(width, width), torch.nn.Conv2d(3, 8, 3)
        self.table = torch.nn.Embedding(20, width)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor, image: torch.Tensor) -> Any:
        x = self.table(tokens)
        scores = self.layer(x) @ x.transpose(0, 1)
        return scores, self.image(image)


def slow(model: Net, partitioner: str | None) -> list[Finding]:
    image = torch.ones(1, 3, 16, 16, dtype=model.image.weight.dtype)
    program = export(model.eval(), (torch.arange(20).repeat(2), image))
    (method,) = plan(program, partitioner).methods
    found = next(find(method)).findings if method.host else ()
    return [finding for finding in found if finding.what.startswith("slow")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_products_and_convolutions_on_the_host(dtype: torch.dtype) -> None:
    (finding,) = slow(Net(dtype), None)
    for word in ("3 x", "addmm", "mm", "convolution", "M floating-point operations"):
        assert word in finding.what
    assert "75 to 240 times as long" in finding.why
    assert len(finding.lines()) == 2
    assert slow(Net(dtype), "xnnpack") == ([finding] if dtype is torch.bfloat16 else [])


def test_few_operations_are_not_slow() -> None:
    assert not slow(Net(width=4), None)


def test_weights_that_each_call_dequantises() -> None:
    model = Net()
    every = quantization.IntxWeightOnlyConfig(torch.int8, PerAxis(0))
    quantization.quantize_(model, every, lambda module, _: isinstance(module, torch.nn.Linear | torch.nn.Embedding))
    products, weights = slow(model, "xnnpack")
    assert "weights of 1 layer," in weights.what
    assert "Int8DynamicActivationIntxWeightConfig" in weights.why
    assert "addmm" in products.what and weights.lines()
    model = Net()
    dynamic = quantization.Int8DynamicActivationIntxWeightConfig(torch.int8, PerAxis(0))
    quantization.quantize_(model, dynamic)
    assert not slow(model, "xnnpack")
