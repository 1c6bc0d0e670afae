"""Files above 2 GB, inside and outside of the program: nightly, with 9 GB of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

from exir_lowering import load, lower

ROWS, WIDTH = 1_100_000, 512
GIVEN = torch.tensor([0, ROWS - 1])

pytestmark = pytest.mark.nightly


class Table(nn.Module):
    """Looks rows up in a table of 2.25 GB."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(ROWS, WIDTH)
        table[-1] = torch.arange(WIDTH)
        self.register_buffer("table", table)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.table[rows] + 1


@pytest.mark.parametrize("external", [None, "weights"])
def test_it_is_emitted_saved_and_loaded(external: Any, tmp_path: Path) -> None:
    path = lower(export(Table(), (GIVEN,))).emit(external_weights=external).save(tmp_path / "large.pte")
    data = tmp_path / "weights.ptd" if external else None
    assert (data or path).stat().st_size > 2**31
    expected = torch.stack([torch.ones(WIDTH), torch.arange(WIDTH) + 1.0])
    result = load(path, data=data, verify="full").run("forward", GIVEN)[0]
    assert torch.equal(result, expected)
