"""`--bounds` and `--sizes`: the largest inputs on the command line are those of Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.export import Dim, export

from exir_lowering import InputError, LoweringOptions, cli, inspect, load, lower

MODEL = """
import torch

class Scores(torch.nn.Module):
    def forward(self, x):
        return (x @ x.transpose(1, 2)).softmax(-1) @ x

def make():
    dims = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("seq", min=2, max=512)}
    return Scores(), ((torch.randn(2, 8, 32),), {}, (dims,))
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "scores.py").write_text(MODEL)
    return f"{tmp_path / 'scores.py'}:make"


def arenas(path: Path) -> dict[str, int]:
    return {method.name: method.memory.bytes for method in inspect(path).methods}


def test_a_file_is_as_small_as_its_largest_inputs(model: str, tmp_path: Path) -> None:
    plain, joint, sets = (tmp_path / f"{name}.pte" for name in ("plain", "joint", "sets"))
    sizes = ("--sizes", "batch=64,seq=16", "--sizes", "batch = 2, seq = 512")
    for path, more in ((plain, ()), (joint, ("--bounds", "batch*seq=1024")), (sets, sizes)):
        assert cli.main(["lower", model, "-o", str(path), *more]) == 0
    assert arenas(plain)["forward"] > 20 * arenas(sets)["forward"]
    assert arenas(plain)["forward"] > 20 * arenas(joint)["forward"]
    loaded = load(joint)
    for shape in ((2, 512, 32), (64, 16, 32), (2, 2, 32)):
        x = torch.randn(shape)
        torch.testing.assert_close(loaded.run("forward", x)[0], (x @ x.mT).softmax(-1) @ x, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"It has 1,048,576 elements.*: sizes are bounded together"):
        loaded.run("forward", torch.randn(64, 512, 32))


def test_they_are_the_options_of_python_by_method_too(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, dims = torch.randn(2, 8, 32), {0: Dim("batch", max=64), 1: Dim("seq", min=2, max=512)}
    texts = export(torch.nn.Softmax(-1), (x,), dynamic_shapes=(dims,))
    torch.export.save(texts, tmp_path / "texts.pt2")  # which does not have the names of dimensions
    bounds = {"texts": {"input.0": 8, "input.1": 100}, "pages": {"input.0*input.1": 600}}
    given = [f"{name}={tmp_path / 'texts.pt2'}" for name in bounds]
    options = ["--bounds", "texts:input.0=8,input.1=100", "--bounds", "pages:input.0*input.1=600"]
    assert cli.main(["lower", *given, *options, "-o", str(tmp_path / "both.pte")]) == 0
    programs = {name: torch.export.load(tmp_path / "texts.pt2") for name in bounds}
    lower(programs, options=LoweringOptions(bounds=bounds)).emit().save(tmp_path / "python.pte")
    assert arenas(tmp_path / "both.pte") == arenas(tmp_path / "python.pte")
    assert arenas(tmp_path / "both.pte")["pages"] < arenas(tmp_path / "both.pte")["texts"]
    capsys.readouterr()
    assert cli.main(["plan", *given, "--sizes", "texts:input.1=4", "--sizes", "pages:input.1=400", "--json"]) == 0
    planned = {one["name"]: one["memory"]["bytes"] for one in json.loads(capsys.readouterr().out)["methods"]}
    assert planned["pages"] == 100 * planned["texts"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bounds", "batch*seq"], "--bounds 'batch*seq': got 'batch*seq', expected DIMENSION=NUMBER"),
        (["--bounds", "seq=8,seq=9"], "--bounds 'seq=8,seq=9': got 'seq=9', expected DIMENSION=NUMBER, each dimension"),
        (["--bounds", "seq=8", "--bounds", "seq=9"], "--bounds 'seq=8 seq=9': a dimension is there twice"),
        (["--bounds", "seq=1e3"], "got 'seq=1e3', expected DIMENSION=NUMBER"),
        (["--sizes", "seq=8", "--sizes", "forward:seq=9"], "--sizes: some have a method and some have none"),
        (["--bounds", "batch*sec=100"], "bounds: the program has no dynamic dimension 'batch*sec'. The dynamic"),
        (["--bounds", "seq=4096"], "seq cannot be at most 4096. The dynamic dimensions are 'batch', 'x.0' (2 to 64)"),
        (["--sizes", "froward:seq=8"], "sizes: there is no method 'froward'; the methods are 'forward'."),
    ],
)
def test_what_is_wrong_is_said_of_the_option(
    options: list[str], message: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["lower", model, "-o", str(tmp_path / "model.pte"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "model.pte").exists()
