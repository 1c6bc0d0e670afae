"""The Edge conversion takes a size of 0 or 1 for at least 2: the report and the command line say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from exir_lowering import LoweringOptions, NarrowedDimension, lower
from exir_lowering.cli import main
from exir_lowering.cli.lower import warn_of_narrowed


class Two(nn.Module):
    def forward(self, x, y):
        return x.exp() @ y


def program(least: int) -> torch.export.ExportedProgram:
    batch, width = Dim("batch", min=least, max=8), Dim("width", min=2, max=4)
    shapes = {"x": {0: batch, 1: width}, "y": {0: width}}
    return export(Two(), (torch.ones(3, 3), torch.ones(3, 5)), dynamic_shapes=shapes)


@pytest.mark.parametrize("fast", [True, False])
def test_what_is_not_narrowed_is_not_told(fast: bool) -> None:
    options = LoweringOptions(fast=fast)
    found = lower({"one": program(1), "two": program(2)}, options=options).report.narrowed
    assert found == (NarrowedDimension("one", "x", 0, (1, 8), (2, 8)),)


def test_the_command_says_it_in_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.pt2"
    torch.export.save(program(1), path)
    assert main(["lower", str(path), "-o", str(tmp_path / "model.pte"), "--no-cache"]) == 0
    assert "warning" not in capfd.readouterr().err  # torch does not narrow the sizes of a program that was loaded
    warn_of_narrowed(lower({"one": program(1), "two": program(1)}).report)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: one: dimension 0 of x is 1..8") and "2..8" in line and "(and 1 more" in line
