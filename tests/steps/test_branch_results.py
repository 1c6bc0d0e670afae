"""Views of what control flow returns: ExecuTorch emits numbers that nothing has written, or does not emit them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from functorch.experimental.control_flow import map as torch_map
from torch._higher_order_ops.scan import scan
from torch.export import export

import exir_lowering
from exir_lowering.partitioners import SupportPartitioner, ops


class View(torch.nn.Module):
    def forward(self, p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(p, lambda x: x + 1, lambda x: x - 1, (x,))
        return y.reshape(-1) * 2


class ViewInBranch(torch.nn.Module):
    def forward(self, p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def outer(x: torch.Tensor) -> Any:
            y = torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,))
            return y.reshape(-1) * 3 + y.reshape(3, 2).sum()

        return torch.cond(p, outer, lambda x: x.reshape(-1).cos(), (x,)) + 1


class ViewOfMap(torch.nn.Module):
    def forward(self, p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch_map(lambda row: row.reshape(3, 1) * 2, x).reshape(-1) + 1


class ViewOfScan(torch.nn.Module):
    def forward(self, p: torch.Tensor, x: torch.Tensor) -> Any:
        last, rows = scan(lambda c, row: (c + row.reshape(-1), (c * row).reshape(3, 1)), torch.ones(3), x)
        return last.reshape(3, 1) + 1, rows.reshape(-1) + 1


@pytest.mark.parametrize("engine", ["runtime", "interpreter"])
@pytest.mark.parametrize("partitioner", [None, SupportPartitioner({"reference": ops("aten.mul.Tensor")})])
@pytest.mark.parametrize("model", [View(), ViewInBranch(), ViewOfMap(), ViewOfScan()], ids=lambda m: type(m).__name__)
def test_the_numbers_are_those_of_eager(model: torch.nn.Module, partitioner: Any, engine: Any) -> None:
    inputs = torch.tensor(True), torch.rand(2, 3)
    program = export(model, inputs)
    buffer = exir_lowering.lower(program, partitioner).emit().buffer
    loaded = exir_lowering.load(buffer, engine=engine)
    for given in (inputs, (torch.tensor(False), torch.rand(2, 3))):
        expected = model(*given)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for got, value in zip(loaded.run("forward", *given), expected, strict=True):
            torch.testing.assert_close(got, value)


def test_executorchs_own_file_has_other_numbers() -> None:
    """When this fails, ExecuTorch has mended it: `steps/branch_results.py` can go."""
    inputs = torch.tensor(True), torch.ones(2, 3)
    emitted = to_edge_transform_and_lower(export(View(), inputs)).to_executorch()
    (got,) = exir_lowering.load(bytes(emitted.buffer)).run("forward", *inputs)
    assert got.tolist() == [0.0] * 6
