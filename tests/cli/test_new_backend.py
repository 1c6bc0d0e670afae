"""`exir-lower new-backend`: the package that it writes installs, lowers, runs, in C++ too, and passes its own tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from folders import ROOT

from exir_lowering import cli

EXAMPLE = ROOT / "docs" / "examples" / "tinyvec"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package my_npu was written, and installed into `site`."""
    folder = tmp_path_factory.mktemp("new")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["new-backend", "my_npu", "--cpp"]) == 0
    shutil.copytree(folder / "my_npu", folder / "source")  # pip leaves files beside what it builds
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [*pip, "--target", str(folder / "site"), str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


WORDS = {"tinyvec": "my_npu", "Tinyvec": "MyNpu", "TINYVEC": "MY_NPU"}


def run(folder: Path, *words: str) -> str:
    """Run Python where the package is installed, and return what it prints."""
    path = os.pathsep.join([str(folder / "site"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_it_has_the_files_and_the_lines_of_the_example_by_its_name(folder: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=EXAMPLE, capture_output=True, text=True
    )
    for name in tracked.stdout.split():
        path = folder / "my_npu" / name.replace("tinyvec", "my_npu")
        expected = re.sub("tinyvec", lambda found: WORDS[found[0]], (EXAMPLE / name).read_text(), flags=re.IGNORECASE)
        assert path.read_text() == expected
    assert len(tracked.stdout.split()) == len([path for path in (folder / "my_npu").rglob("*") if path.is_file()])


def test_it_is_a_plugin_that_lowers_and_runs(folder: Path) -> None:
    listed = run(folder, "-m", "exir_lowering", "plugins", "--check")
    rows = [line.split() for line in listed.splitlines() if " my_npu " in line]
    assert [(kind, state) for kind, *_, state in rows] == [(k, "ok") for k in ("backend", "delegate", "partitioner")]
    assert "equal to eager PyTorch" in run(folder, "my_npu/demo.py")
    run(folder, "-m", "exir_lowering", "lower", "model.pt2", "-p", "my_npu", "-o", "model.pte")
    run(folder, "-m", "exir_lowering", "run", "model.pte", "--save", "outputs.pt")
    (got,) = torch.load(folder / "outputs.pt")
    assert got.shape == (2, 4)


def test_its_tests_pass(folder: Path) -> None:
    """Of the conformance suite and the payloads in C++ a part: the example's tests run all."""
    chosen = "not conformance and not wrong_payload or ops or errors"
    shown = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, "my_npu")
    assert re.search(r"\d+ passed", shown) and "failed" not in shown


def test_without_cpp_nothing_speaks_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new-backend", "npu2"]) == 0
    text = [path.read_text() for path in (tmp_path / "npu2").rglob("*.*")]
    assert not [one for one in text if re.search(r"cpp|tinyvec", one, re.IGNORECASE)]
    assert not list(tmp_path.rglob("*cpp*")) and [path.name for path in tmp_path.iterdir()] == ["npu2"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("My-npu", "Got the name 'My-npu', expected one of a Python package in lower case, such as 'my_npu'."),
        ("class", "Got the name 'class', expected"),
        ("demo", "Got the name 'demo', expected"),
        ("../npu", "Got the name '../npu', expected"),
        ("there", "The name 'there' is taken, by what this folder has, which stays as it is. Choose another one."),
        ("xnnpack", "The name 'xnnpack' is taken, by the plug-in of exir-lowering"),
        ("json", "The name 'json' is taken, by a Python module, which would be hidden. Choose another one."),
    ],
)
def test_a_name_that_cannot_be(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("mine")
    assert cli.main(["new-backend", name]) == 2
    assert text in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"] and (tmp_path / "there").read_text() == "mine"


def test_a_folder_that_cannot_be_written_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "rename", full)
    assert cli.main(["new-backend", "my_npu"]) == 2
    assert "Cannot write 'my_npu': No space left on device. Nothing was changed." in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
