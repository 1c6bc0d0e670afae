"""What `inspect` says that a method takes on a device is what a process takes that runs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from exir_lowering import cli, inspect, lower

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of a process")

PAGES = 5_000_000
"""What a first call takes beside it: code of kernels, stacks of threads, the heap's own."""


def measured(capsys: pytest.CaptureFixture[str], *argv: object) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert cli.main(["bench", *map(str, argv), "--memory", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["files"]


def check(figure: dict[str, Any]) -> None:
    estimated, found = figure["estimated"], figure["measured"]
    assert estimated["peak"] > 25_000_000
    assert estimated["peak"] == pytest.approx(found["peak"], rel=0.1)
    assert estimated["running"] < found["running"] < estimated["running"] * 1.05 + PAGES


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(9) for layer in (nn.Linear(1024, 1024), nn.ReLU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_what_is_estimated_is_what_a_process_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program = export(Layers().eval(), (torch.ones(4, 1024),), dynamic_shapes=({0: Dim("n", min=1, max=64)},))
    for name, partitioner in (("xnnpack", "xnnpack"), ("host", ())):
        lower(program, partitioner).emit().save(tmp_path / f"{name}.pte")
    xnnpack, host = measured(capsys, tmp_path / "xnnpack.pte", "--against", tmp_path / "host.pte")
    check(xnnpack)
    check(host)
    weights = 9 * 4 * (1024 * 1024 + 1024)
    device = inspect(tmp_path / "xnnpack.pte").methods[0].device
    assert (device.packed, device.constants, device.unknown) == (weights, 0, ())
    assert device.workspace == 2 * 64 * 1024 * 4 or device.workspace == 64 * 1024 * 4  # one over the other, or not
    assert device.peak > 2 * weights > host["estimated"]["peak"]  # it is packed while the file is there too
    assert host["estimated"]["constants"] == pytest.approx(weights, rel=0.01)
    text = inspect(tmp_path / "xnnpack.pte").to_text()
    assert f"{device.peak:,}  the most, with what is read while it is loaded" in text


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["resnet18", "vit_tiny", "minilm", "llama_decode"])
def test_whole_models(name: str, benchmark_models: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    built = benchmark_models[name]()
    lower(export(built.model, built.inputs), "xnnpack").emit().save(tmp_path / "model.pte")
    torch.save([built.inputs], tmp_path / "inputs.pt")
    check(*measured(capsys, tmp_path / "model.pte", "--inputs", tmp_path / "inputs.pt"))


@pytest.fixture
def benchmark_models(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], Any]]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    from latency_models import MODELS

    return MODELS
