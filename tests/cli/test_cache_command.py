"""`exir-lower cache`, and the cache of `exir-lower lower`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cached import layers
from torch.export import save

from exir_lowering import cli


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt2"
    save(layers(), path)
    return path


def test_lower_uses_the_cache(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, targets = model.parent / "store", [model.parent / f"{number}.pte" for number in range(3)]

    def call(target: Path, *more: str) -> str:
        assert cli.main(["lower", str(model), "-p", "xnnpack", "-o", str(target), *more]) == 0
        return capsys.readouterr().out

    for target, hit in ((targets[0], False), (targets[1], True)):
        uses = json.loads(call(target, "--cache", str(folder), "--json"))["cache"]
        assert [use["hit"] for use in uses] == [hit] * 5
    assert json.loads(call(targets[2], "--no-cache", "--json"))["cache"] == []
    assert len({target.read_bytes() for target in targets}) == 1


def test_the_cache_is_on_unless_it_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model.parent / "user"
    monkeypatch.setenv("EXIR_LOWERING_CACHE", str(folder))
    arguments = ["lower", str(model), "-p", "xnnpack", "-o", str(model.with_suffix(".pte"))]
    assert cli.main([*arguments, "--no-cache"]) == 0 and not folder.exists()
    assert cli.main(arguments) == 0 and list(folder.glob("*.entry"))
    capsys.readouterr()
    assert cli.main(["cache", "info", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["folder"] == str(folder) and info["partitions"] == 5 and info["bytes"] > 0
    assert cli.main(["cache", "info"]) == 0
    out = capsys.readouterr().out
    assert "lowered partitions" in out and "of at most" in out
    assert cli.main(["cache", "clear"]) == 0
    assert "Removed" in capsys.readouterr().out
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_used_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["cache", "info", "--cache", str(tmp_path / "file" / "below")]) == 2
    assert "cannot be used" in capsys.readouterr().err
