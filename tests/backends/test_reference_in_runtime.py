"""The reference backend end to end: lowered, emitted, executed by its Python delegate in ExecuTorch's runtime."""

from __future__ import annotations

import warnings

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from models import exported
from torch.export import Dim, export

import exir_lowering
from exir_lowering.backends.reference import ReferenceBackend, ReferenceDelegate
from exir_lowering.partitioners import SupportPartitioner, everything, ops


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_whole_model(name: str) -> None:
    module, inputs, program = exported(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lowered = exir_lowering.lower(
            program,
            SupportPartitioner({"reference": everything()}),
            backends={"reference": ReferenceBackend()},
        )
    assert lowered.report.methods[0].coverage == 1.0
    program = exir_lowering.load(lowered.emit().buffer, delegates=[ReferenceDelegate()])
    (got,) = program.run("forward", *inputs)
    torch.testing.assert_close(got, module(*inputs), atol=1e-5, rtol=1e-5)


def test_beside_xnnpack_and_portable_kernels_with_a_dynamic_batch() -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cumsum(self.second(torch.erf(self.first(x))), 0)

    model = Mixed().eval()
    program = export(model, (torch.randn(4, 4),), dynamic_shapes={"x": {0: Dim("batch", min=1, max=16)}})
    reference = SupportPartitioner({"reference": ops("aten.erf")})
    lowered = exir_lowering.lower(
        program, [XnnpackPartitioner(), reference], backends={"reference": ReferenceBackend()}
    )
    (method,) = lowered.report.methods
    assert {p.backend_id for p in method.partitions} == {"XnnpackBackend", "reference"} and method.host
    runs = exir_lowering.load(lowered.emit().buffer, delegates=[ReferenceDelegate()])
    for size in (4, 1, 16, 7):
        value = torch.randn(size, 4)
        torch.testing.assert_close(runs.run("forward", value)[0], model(value), atol=1e-5, rtol=1e-5)
