"""Where operators go, as a command line says it: installed partitioners, those of modules, variants."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import export

from exir_lowering import cli

Plan = Callable[..., list[dict[str, Any]]]

MINE = """
from exir_lowering.partitioners import RuledPartitioner, SupportPartitioner, deny, ops
from exir_lowering.backends.xnnpack import xnnpack

class Sines(SupportPartitioner):
    def __init__(self):
        super().__init__({"reference": ops("aten.sin.default")})

def without_relu():
    return RuledPartitioner(xnnpack(), deny(op="aten.relu"))

def misspelt():
    return RuledPartitioner(xnnpack(), deny(op="aten.relo"))

def broken():
    raise ZeroDivisionError("by zero")

made = Sines()
number = 3
"""


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.second(torch.sin(self.first(x)))).relu()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: Path) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pt2").symlink_to(models / "model.pt2")
    (tmp_path / "mine.py").write_text(MINE)
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    torch.export.save(export(Net().eval(), (torch.randn(2, 8),)), folder / "model.pt2")
    return folder


@pytest.fixture
def plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Return the methods of a plan."""

    def run(*argv: str) -> list[dict[str, Any]]:
        capsys.readouterr()
        code = cli.main(["plan", *argv, "--json"])
        out, err = capsys.readouterr()
        assert code == 0, err
        methods: list[dict[str, Any]] = json.loads(out)["methods"]
        return methods

    return run


@pytest.fixture
def told(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return what a command says that is refused."""

    def run(*argv: str) -> str:
        capsys.readouterr()
        assert cli.main([*argv]) == 2
        out, err = capsys.readouterr()
        assert out == "" and "Traceback" not in err
        return err

    return run


def backends(method: dict[str, Any]) -> list[str]:
    return sorted({partition["backend_id"] for partition in method["partitions"]})


def test_partitioners_in_their_order(plan: Plan) -> None:
    for given in ("mine:Sines", "mine:made"):
        (method,) = plan("model.pt2", "-p", given, "-p", "xnnpack")
        assert backends(method) == ["XnnpackBackend", "reference"] and not method["host"]
    (method,) = plan("model.pt2", "-p", "mine:without_relu")
    assert [node["node"] for node in method["host"]] == ["aten_relu_default"]
    (method,) = plan("model.pt2")
    assert backends(method) == []


def test_what_is_wrong_with_a_partitioner_is_said_with_the_nearest(told: Callable[..., str]) -> None:
    for given, parts in {
        "xnpack": ("'xnnpack'",),
        "xnnpack:": ("MODULE:FUNCTION",),
        ":P": ("MODULE:FUNCTION",),
        "xnnpack:per_op_mode=true": ("returns a partitioner with options and rules",),
        "mine:Sine": ("has no 'Sine'", "'Sines'"),
        "mine:broken": ("calling broken raised ZeroDivisionError: by zero",),
        "mine:number": ("cannot be called",),
        "mine:misspelt": ("'aten.relo' does not exist", "'aten.relu'"),
        "mine:Sines.mro": ("it makes a list, expected an ExecuTorch Partitioner",),
        "no.such.module:P": ("'no.such.module' cannot be imported: ModuleNotFoundError",),
    }.items():
        message = told("plan", "model.pt2", "-p", given)
        assert all(part in message for part in parts), message


def test_lower_requires_a_coverage_before_a_backend_is_called(told: Callable[..., str], folder: Path) -> None:
    said = told("lower", "model.pt2", "-p", "mine:Sines", "-o", "x.pte", "--require-coverage", "0.9")
    assert "operators are delegated" in said and "or relax --require-coverage." in said
    assert not (folder / "x.pte").exists()


def test_variants(plan: Plan, told: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    given = ("model.pt2", "--variant", "npu=mine:Sines,xnnpack", "--variant", "cpu=xnnpack")
    methods = plan(*given, "--variant", "host=")
    assert [(one["name"], backends(one)) for one in methods] == [
        ("forward@npu", ["XnnpackBackend", "reference"]),
        ("forward@cpu", ["XnnpackBackend"]),
        ("forward@host", []),
    ]
    assert "takes the place of -p" in told("plan", "model.pt2", "-p", "xnnpack", "--variant", "cpu=xnnpack")
    assert "expected NAME=PARTITIONER" in told("plan", "model.pt2", "--variant", "cpu")
    assert "got the name 'a@b'" in told("plan", "model.pt2", "--variant", "a@b=xnnpack")
    assert cli.main(["lower", *given, "-o", "m.pte"]) == 0
    capsys.readouterr()
    assert cli.main(["run", "m.pte"]) == 0
    assert "forward is forward@npu: the first whose backends are available." in capsys.readouterr().out
    assert cli.main(["run", "m.pte", "--method", "forward@cpu"]) == 0
    assert "forward@npu" not in capsys.readouterr().out
