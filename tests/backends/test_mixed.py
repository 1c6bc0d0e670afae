"""One file with XNNPACK, a Python delegate and portable kernels, two methods, a dynamic batch and state."""

from __future__ import annotations

import pytest
import torch
from executorch.exir import ExecutorchBackendConfig
from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
from lowering_support import delegates
from torch.export import Dim, export

import exir_lowering
from exir_lowering.backends.xnnpack.partitioner import xnnpack
from exir_lowering.partitioners import ChainedPartitioner, SupportPartitioner, ops

BATCH = Dim("batch", min=1, max=8)


class Mixed(torch.nn.Module):
    """XNNPACK gets the linear layer, the Python delegate products and sums, the host the sine and the state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("total", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.sin(self.linear(x)) * x + x
        self.total.add_(y.sum(0))
        return y * 3.0, self.total + 0.0


class Plain(torch.nn.Module):
    """The same layer without state."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.linear(x) * y) + y


@pytest.fixture(scope="module")
def models() -> tuple[Mixed, Plain]:
    torch.manual_seed(0)
    mixed = Mixed().eval().requires_grad_(False)
    return mixed, Plain(mixed.linear)


@pytest.fixture(scope="module")
def file(models: tuple[Mixed, Plain]) -> bytes:
    mixed, plain = models
    two = torch.ones(2, 4)
    programs = {
        "mixed": export(mixed, (two,), dynamic_shapes=({0: BATCH},)),
        "plain": export(plain, (two, two.clone()), dynamic_shapes=({0: BATCH}, {0: BATCH})),
    }
    sums = SupportPartitioner({"reference": ops("aten.mul", "aten.add", "aten.sum")})
    lowered = exir_lowering.lower(programs, ChainedPartitioner(xnnpack(operators=["aten.linear"]), sums))
    for method in lowered.report.methods:
        assert {d.backend_id for d in delegates(lowered[method.name])} == {"XnnpackBackend", "reference"}
        assert "aten.sin.default" in {node.operator for node in method.host}
    config = ExecutorchBackendConfig(passes=[InitializedMutableBufferPass(["total"])])
    return lowered.emit(config).buffer


def test_a_hundred_calls_of_changing_shapes(file: bytes, models: tuple[Mixed, Plain]) -> None:
    mixed, plain = models
    program = exir_lowering.load(file)
    generator = torch.Generator().manual_seed(0)
    mixed.total.copy_(torch.arange(4.0))
    for call in range(100):
        x = torch.randn(1 + (call * 5) % 8, 4, generator=generator)
        for result, wanted in zip(program.run("mixed", x), mixed(x), strict=True):
            torch.testing.assert_close(result, wanted, atol=1e-4, rtol=1e-4)
        x, y = torch.randn(2, 8 - (call * 3) % 8, 4, generator=generator)
        (result,) = program.run("plain", x, y)
        torch.testing.assert_close(result, plain(x, y), atol=1e-5, rtol=1e-5)
