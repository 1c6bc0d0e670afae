"""`exir-lower lower --constant` and `--runner-metadata`: methods that return a constant, and who reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim, ExportedProgram, export

import exir_lowering
from exir_lowering import cli

Main = Callable[..., tuple[int, str, str]]


class Counting(torch.nn.Module):
    """A language model that has a cache of keys and values, and looks at it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(20, 8)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, 2, 32, 4), persistent=False)

    def forward(self, tokens: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(tokens)
        where = torch.arange(tokens.shape[1]) + start
        parts = embedded.view(1, -1, 2, 4).transpose(1, 2)
        self.keys.index_copy_(2, where, parts)
        self.values.index_copy_(2, where, parts + 1)
        seen = (self.keys * self.values).sum(2).view(1, 1, 8)
        return (embedded + seen) @ self.embedding.weight.T


def program(*, length: int | None = None) -> ExportedProgram:
    shapes = None if length else ({1: Dim("length", max=31)}, None)
    return export(Counting(), (torch.ones(1, length or 3, dtype=torch.int64), torch.tensor([0])), dynamic_shapes=shapes)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    torch.export.save(program(), folder / "model.pt2")
    torch.export.save(program(length=1), folder / "step.pt2")
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
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


GIVEN = {
    "get_max_seq_len=64": 64,
    "low=-3": -3,
    "rate=0.5": 0.5,
    "whole:float=2": 2.0,
    "use_kv_cache=true": True,
    "off=False": False,
    "one:bool=true": True,
    "who=llama": "llama",
    'quoted="12"': "12",
    "version:str=1.5": "1.5",
    "list:str=[1,2]": "[1,2]",
    "nothing:str=": "",
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
    expected = {given.split("=")[0].split(":")[0]: value for given, value in GIVEN.items()}
    assert found == expected
    assert {name: type(value) for name, value in found.items()} == {n: type(v) for n, v in expected.items()}


@pytest.mark.parametrize(
    "given",
    [
        *("get_max_seq_len", "=64", "get max=1", "a:long=1", "a:=1", "1a=1"),
        *(
            "a=",
            "a:int=1.5",
            "a:int=x",
            "a:bool=1",
            "a:float=one",
            "a=[1",
            "a=[]",
            "a=[1,2.5]",
            "a=[1,true]",
            "a=[[1]]",
        ),
        *(
            "a=null",
            'a={"b":1}',
            "a=1e999",
            "a=NaN",
            "a=9223372036854775808",
            "a:int=-9223372036854775809",
            "a=" + "[" * 2000,
        ),
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


def test_the_metadata_of_a_runner_is_what_the_program_says(main: Main, models: Path) -> None:
    file = models / "runner.pte"
    programs = f"forward={models / 'model.pt2'}", f"step={models / 'step.pt2'}"
    options = "--runner-metadata", "--constant", "get_eos_ids=[7,9]", "--constant", "get_max_seq_len=30"
    code, _, err = main("lower", *programs, "-p", "xnnpack", "-o", file, *options)
    assert code == 0, err
    assert constants(file) == {
        "get_vocab_size": 20,
        "get_max_seq_len": 30,  # as given; the cache has 32
        "get_max_context_len": 32,
        "get_n_layers": 1,
        "get_eos_ids": [7, 9],
        "use_kv_cache": True,
        "use_sdpa_with_kv_cache": False,
        "enable_dynamic_shape": True,
    }
    tokens = torch.tensor([[1, 2, 3]])
    (got,) = exir_lowering.load(file).run("forward", tokens, torch.tensor([0]))
    torch.testing.assert_close(got, Counting()(tokens, torch.tensor([0])))


def test_a_program_of_one_length_is_told_apart(main: Main, models: Path) -> None:
    code, _, err = main("lower", models / "step.pt2", "-o", models / "one.pte", "--runner-metadata")
    assert code == 0, err
    found = constants(models / "one.pte")
    assert (found["enable_dynamic_shape"], found["get_max_seq_len"]) == (False, 32)


def test_what_the_runner_cannot_run_is_refused(main: Main, models: Path) -> None:
    def refused(*programs: str) -> str:
        named = [f"{name}={models / file}" for name, _, file in (given.partition("=") for given in programs)]
        code, out, err = main("lower", *named, "-o", models / "no.pte", "--runner-metadata")
        assert (code, out) == (2, "") and err.count("\n") == 2
        return err

    assert "takes [1, 4] of float32 and returns [1, 4] of float32" in refused("forward=linear.pt2")
    assert "there are 'prefill', 'step'" in refused("prefill=model.pt2", "step=step.pt2")
    assert "Give 'decode' another name" in refused("forward=model.pt2", "decode=step.pt2")
