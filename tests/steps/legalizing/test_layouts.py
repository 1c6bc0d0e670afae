"""What takes an operator's place may lie in memory in another order than its results: what reads it knows that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import export
from torch.utils._pytree import tree_leaves

import exir_lowering

PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "returned": torch.linalg.inv,
    "read": lambda a: (torch.linalg.inv(a) * 2 + a).relu().sum(1),
    "twice": lambda a: torch.linalg.inv(torch.linalg.inv(a) + a) @ a,
    "turned": lambda a: (
        torch.linalg.inv(a).mT.contiguous(),
        torch.linalg.inv(a).reshape(-1),
        torch.linalg.inv(a)[:, 1],
    ),
    "joined": lambda a: torch.cat([torch.linalg.inv(a), torch.linalg.qr(a)[0].exp()], 1).permute(2, 0, 1),
    "several": lambda a: (*torch.linalg.qr(a), *torch.linalg.lu(a), torch.linalg.det(a), torch.logdet(a @ a.mT)),
    "solved": lambda a: (torch.linalg.solve(a, a[..., :2]), torch.linalg.solve_triangular(a, a, upper=True)),
    "roots": lambda a: (torch.linalg.cholesky(a @ a.mT), torch.cholesky_inverse(a), torch.linalg.cholesky_ex(a @ a.mT)),
}


class _Model(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, a: torch.Tensor) -> Any:
        return self.function(a + 0 * self.linear(a))


@pytest.mark.parametrize(
    ("name", "partitioner"), [*((name, None) for name in PROGRAMS), ("read", "xnnpack"), ("joined", "xnnpack")]
)
def test_factors_of_matrices_are_read_as_they_lie(name: str, partitioner: str | None) -> None:
    torch.manual_seed(0)
    model = _Model(PROGRAMS[name]).eval()
    calls = [torch.randn(2, 3, 3) + 4 * torch.eye(3) for _ in range(2)]
    with torch.no_grad():
        loaded = exir_lowering.load(exir_lowering.lower(export(model, (calls[0],)), partitioner).emit().buffer)
        for call in calls:
            for got, want in zip(loaded.run("forward", call), tree_leaves(model(call)), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_matrices_without_an_inverse_have_infinite_ones() -> None:
    model = _Model(torch.linalg.inv)
    program = export(model, (torch.eye(3),))
    loaded = exir_lowering.load(exir_lowering.lower(program).emit().buffer)
    (found,) = loaded.run("forward", torch.zeros(3, 3))
    assert not found.isfinite().all()
    assert torch.equal(loaded.run("forward", torch.eye(3))[0], torch.eye(3))
