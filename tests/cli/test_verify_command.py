"""`exir-lower verify`, and the new name of the check of digests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.export import ExportedProgram, export, save

from exir_lowering import cli, lower


def _program(seed: int) -> ExportedProgram:
    torch.manual_seed(seed)
    return export(torch.nn.Linear(4, 3).eval(), (torch.ones(2, 4),))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    lower({"one": _program(0), "two": _program(1)}).emit().save(tmp_path / "model.pte")
    for number, name in enumerate(("one", "two")):
        save(_program(number), tmp_path / f"{name}.pt2")
    torch.save({"one": [(torch.ones(2, 4),)], "two": [(torch.ones(2, 4),)]}, tmp_path / "inputs.pt")
    return tmp_path


def test_verify(files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    right, wrong = ["one=one.pt2", "two=two.pt2"], ["one=two.pt2", "two=two.pt2"]
    assert cli.main(["verify", "model.pte", *right]) == 0
    assert "'model.pte' matches eager PyTorch" in capsys.readouterr().out
    assert cli.main(["verify", "model.pte", *wrong, "--inputs", "inputs.pt", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert [method["ok"] for method in found["methods"]] == [False, True] and not found["ok"]
    assert cli.main(["verify", "model.pte", *wrong, "--tolerance", "1000"]) == 0
    assert cli.main(["verify", "model.pte", "one.pt2"]) == 2
    assert "no method 'forward'; it has 'one', 'two'" in " ".join(capsys.readouterr().err.split())
    assert cli.main(["verify", "model.pte", *right, "--tolerance", "-1"]) == 2
    assert cli.main(["verify", "model.pte", *right, "--inputs", "one.pt2"]) == 2
    assert "torch.save([(x, y), ...]" in capsys.readouterr().err
    assert cli.main(["verify", "model.pte", *right, "--bundled"]) == 2
    assert "exir-lower verify: 'model.pte' has no bundled inputs" in " ".join(capsys.readouterr().err.split())
