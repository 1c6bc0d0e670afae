"""`exir-lower lower --constant`: methods that return a constant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import export

import exir_lowering
from exir_lowering import cli

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    torch.export.save(export(torch.nn.Linear(4, 4), (torch.ones(1, 4),)), folder / "linear.pt2")
    return folder


@pytest.fixture
def main(capsys: pytest.CaptureFixture[str]) -> Main:
    def run(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(argument) for argument in argv])
        return code, *capsys.readouterr()

    return run


def constants(file: Path) -> dict[str, Any]:
    loaded = exir_lowering.load(file)
    names = (name for name in loaded.method_names if name not in ("forward", "step"))
    found = {name: loaded.run(name) for name in names}
    return {name: values[0] if len(values) == 1 else list(values) for name, values in found.items()}


GIVEN = {
    "get_max_seq_len=64": 64,
    "low=-3": -3,
    "rate=0.5": 0.5,
    "use_kv_cache=true": True,
    "off=False": False,
    "who=llama": "llama",
    'quoted="12"': "12",
    "equal=a=b": "a=b",
    "get_eos_ids=[1, 2]": [1, 2],
    "rates=[0.5,1.0]": [0.5, 1.0],
    "switches=[true,false]": [True, False],
}


def test_values_have_the_types_that_they_are_given(main: Main, models: Path) -> None:
    file = models / "typed.pte"
    options = [word for given in GIVEN for word in ("--constant", given)]
    code, out, err = main("lower", models / "linear.pt2", "-o", file, *options)
    assert code == 0, err
    assert "get_max_seq_len=64" in out
    found = constants(file)
    expected = {given.split("=")[0]: value for given, value in GIVEN.items()}
    assert found == expected
    assert {name: type(value) for name, value in found.items()} == {n: type(v) for n, v in expected.items()}


@pytest.mark.parametrize(
    "given",
    [
        *("get_max_seq_len", "=64", "get max=1", "a:int=1", "1a=1", "a=", "a=[1", "a=[]", "a=[1,2.5]", "a=[1,true]"),
        *("a=[[1]]", "a=null", 'a={"b":1}', "a=1e999", "a=NaN", "a=9223372036854775808", "a=" + "[" * 2000),
    ],
    ids=lambda given: given[:12],
)
def test_what_is_no_value_is_refused(main: Main, models: Path, given: str) -> None:
    code, out, err = main("lower", models / "linear.pt2", "-o", models / "no.pte", "--constant", given)
    assert (code, out) == (2, "")
    assert err.startswith(f"exir-lower lower: --constant {given[:12]!r}"[:-1]) and "xpected " in err
    assert err.count("\n") == 2 and "Traceback" not in err
    assert not (models / "no.pte").exists()


def test_a_name_is_given_once(main: Main, models: Path) -> None:
    for names in (["a=1", "a=2"], ["forward=1"]):
        options = [word for name in names for word in ("--constant", name)]
        code, _, err = main("lower", models / "linear.pt2", "-o", models / "no.pte", *options)
        assert code == 2 and f"there is a method {names[0].split('=')[0]!r} already" in err
