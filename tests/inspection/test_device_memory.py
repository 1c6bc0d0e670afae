"""What `inspect` says that a method takes on a device is what a process takes that runs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import device_client
import forked
import joint_models
import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

from exir_lowering import cli, inspect, lower, plan

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
        self.layers = nn.Sequential(*(layer for _ in range(16) for layer in (nn.Linear(1024, 1024), nn.ReLU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_what_is_estimated_is_what_a_process_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program = export(Layers().eval(), (torch.ones(4, 1024),), dynamic_shapes=({0: Dim("n", min=1, max=64)},))
    for name, partitioner in (("xnnpack", "xnnpack"), ("host", ())):
        lower(program, partitioner).emit().save(tmp_path / f"{name}.pte")
    xnnpack, host = measured(capsys, tmp_path / "xnnpack.pte", "--against", tmp_path / "host.pte")
    check(xnnpack)
    check(host)
    weights = 16 * 4 * (1024 * 1024 + 1024)
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


CLIENT = r"""
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <cstdio>
#include <fstream>
#include <string>
OPTION
static long resident() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) if (line.rfind("VmRSS:", 0) == 0) return std::stol(line.substr(6));
  return 0;
}
int main(int count, char** words) {
  const long before = resident();
  if (count > 2) enable();
  executorch::extension::Module module(words[1], executorch::extension::Module::LoadMode::Mmap);
  for (const char* method : {"prefill", "decode"}) {
    const int rows = method[0] == 'p' ? 16 : 1;
    auto input = executorch::extension::make_tensor_ptr({rows, 1024}, std::vector<float>(rows * 1024, 0.5f));
    auto outputs = module.execute(method, input);
    if (!outputs.ok()) return 1;
    for (int i = 0; i < 8; ++i) std::printf("%.5g ", outputs->at(0).toTensor().const_data_ptr<float>()[i]);
  }
  std::printf("\n%ld\n", (resident() - before) * 1024);
}
"""


def test_the_weight_cache_of_the_guide_packs_a_weight_once(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/memory.md").read_text()
    lines = guide.partition("```cpp\n")[2].partition("```")[0].splitlines()
    option = "\n".join([lines[0], "static void enable() {", *lines[1:], "}"])
    client = device_client.build(tmp_path, CLIENT.replace("OPTION", option))
    model = Layers().eval()
    programs = {name: export(model, (torch.ones(rows, 1024),)) for name, rows in (("prefill", 16), ("decode", 1))}
    path = lower(programs, "xnnpack").emit().save(tmp_path / "model.pte")
    plain, cached = (device_client.output(client, path, *more).splitlines() for more in ((), ("cache",)))
    packed = [method.device.packed for method in inspect(path).methods]
    assert plain[0] == cached[0] and len(set(packed)) == 1
    assert int(plain[1]) == pytest.approx(sum(packed), rel=0.1)
    assert int(cached[1]) == pytest.approx(packed[0], rel=0.15)


def test_lowering_makes_one_copy_of_the_weights(tmp_path: Path) -> None:
    code = """
import sys, torch
from exir_lowering import lower

def resident(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

def program(width):
    layers = [torch.nn.Linear(width, width) for _ in range(12)]
    return torch.export.export(torch.nn.Sequential(*layers).eval(), (torch.ones(1, width),))

lower(program(8), "xnnpack").emit().save(sys.argv[1])
given = program(1024)
open("/proc/self/clear_refs", "w").write("5")
before = resident("VmRSS")
lower(given, "xnnpack").emit().save(sys.argv[1])
print((resident("VmHWM") - before) / (12 * 4 * 1024 * 1024))
"""
    done = forked.run(code, tmp_path / "model.pte")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.4


class Network(nn.Module):
    """Convolutions of all kinds, with what is folded into them, and a layer that stays on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.BatchNorm2d(32), nn.ReLU6()),
            *(nn.Conv2d(32, 256, 1), nn.MaxPool2d(2), nn.Conv2d(256, 256, 3, 1, 1), nn.ReLU()),
            *(nn.ConvTranspose2d(256, 48, 2, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 100)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).erf()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(128, 256, batch_first=True), nn.Linear(256, 10)
        self.register_buffer("calls", torch.zeros(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.head(self.lstm(x)[0][:, -1]) + self.calls[:10]


def encoder() -> ExportedProgram:
    """Export an encoder of texts as BERT is, for any number of texts of any length."""
    tokens, dims = torch.ones(2, 16, dtype=torch.long), {0: Dim("batch", max=8), 1: Dim("seq", min=2, max=64)}
    return export(joint_models.Encoder(192).eval(), (tokens, tokens), dynamic_shapes=(dims, dims))


PROGRAMS = {
    "convolutions": lambda: export(Network().eval(), (torch.randn(1, 3, 96, 96),)),
    "encoder": encoder,
    "LSTM": lambda: export(Recurrent().eval(), (torch.randn(1, 8, 128),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plan_knows_before_a_backend_is_called(name: str) -> None:
    program = PROGRAMS[name]()
    planned = plan(program, "xnnpack")
    (found,) = (one.device for one in inspect(lower(program, "xnnpack").emit().buffer).methods)
    device = planned.methods[0].memory.device
    assert (device.planned, device.state, device.unknown) == (found.planned, found.state, ())
    assert (found.state > 0) == (name == "LSTM")
    assert found.packed > 500_000 and found.workspace > 10_000
    for field in ("constants", "packed", "workspace", "running", "peak"):
        assert getattr(device, field) == pytest.approx(getattr(found, field), rel=0.1), field
    text = planned.to_text(everything=True)
    assert "On a device" in text and f"{device.packed:,}  weights that XNNPACK packs" in text
    assert f" in use at the peak), {device.peak / 1e6:.1f} MB in all" in planned.to_text()


def test_a_plan_names_backends_of_which_nothing_is_known() -> None:
    program = export(nn.Sequential(nn.Linear(64, 64), nn.ReLU()).eval(), (torch.ones(1, 64),))
    found = inspect(lower(program, "reference").emit().buffer).methods[0].device
    device = plan(program, "reference").methods[0].memory.device
    assert device.unknown == found.unknown == ("reference",)
    assert (device.planned, device.running) == (found.planned, found.running)
