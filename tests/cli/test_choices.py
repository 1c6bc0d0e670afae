"""Where operators go, as a command line says it: partitioners with options, rules, and settings in a file."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import export

from exir_lowering import CompileSpec, InputError, cli
from exir_lowering.cli import partitioning

Plan = Callable[..., list[dict[str, Any]]]

MINE = """
from exir_lowering.partitioners import SupportPartitioner, ops

def Sines(level, backend="reference", compile_specs=()):
    assert level == 2, level
    return SupportPartitioner({backend: ops("aten.sin.default")}, compile_specs={backend: list(compile_specs)})

def broken():
    raise ZeroDivisionError("by zero")

number = 3
"""


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.second(torch.sin(self.first(x)))).relu()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pt2").symlink_to(models / "model.pt2")
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


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
    return sorted(partition["backend_id"] for partition in method["partitions"])


@pytest.mark.parametrize(
    ("text", "method", "place", "factory", "options"),
    [
        ("xnnpack", "", "xnnpack", "", {}),
        ("acme.npu:fast=true", "", "acme.npu", "", {"fast": True}),
        ("decode=xnnpack:a=1,b=x", "decode", "xnnpack", "", {"a": 1, "b": "x"}),
        ("with-a-hyphen=x:o=[p,q]", "with-a-hyphen", "x", "", {"o": ["p", "q"]}),
        ("x:o=p,o=q", "", "x", "", {"o": ["p", "q"]}),
        ('x:o="a,b",n=none,f=1.5,t=a=b', "", "x", "", {"o": "a,b", "n": None, "f": 1.5, "t": "a=b"}),
        ("x:o={a:1,b:[c,2]}", "", "x", "", {"o": {"a": 1, "b": ["c", 2]}}),
        ("acme.npu:make.one:o=a:b", "", "acme.npu", "make.one", {"o": "a:b"}),
        ("m=./a=b/mine.py:P", "m", "./a=b/mine.py", "P", {}),
        ("./a=b/mine.py:P:o=1", "", "./a=b/mine.py", "P", {"o": 1}),
        ("C:/mine.py:P", "", "C:/mine.py", "P", {}),
    ],
)
def test_there_is_one_way_to_read_a_partitioner(
    text: str, method: str, place: str, factory: str, options: dict[str, Any]
) -> None:
    given = partitioning.read_partitioner(text)
    assert (given.method, given.place, given.factory) == (method, place, factory)
    values: dict[str, list[Any]] = {}
    for name, value in given.options:
        values.setdefault(name, []).append(partitioning.read_value("", value))
    assert {name: many if len(many) > 1 else many[0] for name, many in values.items()} == options


@pytest.mark.parametrize(
    "text", ["", "=x", "x:", "m=", "./mine.py", "x:F:", "x:a-b", "x:o=[1", 'x:o="', "x:o=1,p", "x:F:p"]
)
def test_what_is_no_partitioner_says_what_to_write(text: str) -> None:
    with pytest.raises(InputError, match=r"expected|ends without"):
        partitioning.read_partitioner(text)


def test_partitioners_with_options_for_methods_in_their_order(plan: Plan) -> None:
    both = ("a=model.pt2", "b=model.pt2")
    first, second = plan(*both, "-p", "a=./mine.py:Sines:level=2", "-p", "xnnpack:per_op_mode=true")
    assert backends(first).count("reference") == 2 and "reference" not in backends(second)
    assert len(second["partitions"]) == len([node for node in second["nodes"] if node["partition"]]) > 3
    (whole,) = plan("model.pt2", "-p", "xnnpack")
    assert backends(whole) == ["XnnpackBackend"]
    before = list(sys.path)
    (module,) = plan("model.pt2", "-p", "mine:Sines:level=2,backend=echo")
    assert set(backends(module)) == {"echo"} and sys.path == before
    first, second = plan(*both, "-p", "b=xnnpack")
    assert not first["partitions"] and second["partitions"]


def test_what_is_wrong_with_a_partitioner_is_said_with_the_nearest(told: Callable[..., str]) -> None:
    for given, parts in {
        "xnnpack:per_op_mod=true": ("has no option 'per_op_mod'", "'per_op_mode'"),
        "xnnpack:per_op_mode=1": ("expected True or False",),
        "xnnpack:per_op_mode": ("expected OPTION=VALUE, such as xnnpack:per_op_mode=true",),
        "xnpack": ("'xnnpack'",),
        "./mine.py:Sine": ("has no 'Sine'", "'Sines'"),
        "./mine.py:Sines": ("Sines needs level. Add :level=...",),
        "./mine.py:Sines:level=3": ("calling Sines raised AssertionError: 3",),
        "./mine.py:broken": ("calling broken raised ZeroDivisionError: by zero",),
        "./mine.py:number": ("cannot be called",),
        "./mine.py:SupportPartitioner.mro": ("it makes a list, expected an ExecuTorch Partitioner",),
        "./none.py:P": ("There is no file './none.py'",),
        "no.such.module:P": ("'no.such.module' cannot be imported: ModuleNotFoundError",),
        "forwart=xnnpack": ("there is no method 'forwart'", "'forward'"),
    }.items():
        message = told("plan", "model.pt2", "-p", given)
        assert all(part in message for part in parts), message


def test_the_first_rule_that_matches_decides(plan: Plan) -> None:
    def host(*rules: str, method: int = 0) -> list[str]:
        both = ("a=model.pt2", "b=model.pt2", "-p", "./mine.py:Sines:level=2", "-p", "xnnpack")
        return [node["node"] for node in plan(*both, *rules)[method]["host"]]

    assert host() == []
    assert host("--deny", "op=aten.sin") == ["aten_sin_default", "aten_sin_default_1"]
    kept = ("--allow", "name=aten_sin_default,to=reference", "--deny", "op=[aten.sin,aten.relu]")
    assert host(*kept) == ["aten_sin_default_1", "aten_relu_default"]
    assert len(host(*kept[2:], *kept[:2])) == 3
    assert host("--pin", "to=host,module=second,method=b") == []
    assert len(host("--pin", "to=host,module=second,method=b", method=1)) == 2


def test_rules_that_are_wrong(told: Callable[..., str]) -> None:
    for rule, parts in {
        "--deny ops=aten.sin": ("there is no criterion 'ops'", "'op'"),
        "--deny to=host,op=aten.sin": ("there is no criterion 'to'",),
        "--deny op=aten.sinn": ("'aten.sinn' does not exist", "'aten.sin'"),
        "--deny module=secnd": ("'second'", "Add method=NAME to the rule", "required=false"),
        "--pin op=aten.sin": ("expected to=BACKEND or to=host",),
        "--allow op=aten.sin,required=maybe": ("expected true or false",),
        "--allow op=aten.sin,method=a": ("there is no method 'a'",),
        "--pin to=a,to=b,op=aten.sin": ("to is given twice",),
        "--pin to=a,op=aten.sin,compile_specs=x": ("expected compile specs such as {device:CPU}",),
    }.items():
        message = told("plan", "model.pt2", "-p", "xnnpack", *rule.split(" "))
        assert all(part in message for part in parts), message
    assert "Add -p NAME" in told("plan", "model.pt2", "--deny", "op=aten.sin")


def test_what_a_plan_advises_can_be_done(folder: Path, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("model.pt2", "-p", "xnnpack:operators=[aten.linear,aten.relu]")
    assert len(plan(*given)[0]["partitions"]) > 1
    assert cli.main(["plan", *given]) == 0
    advised = re.search(r"if it supports what this rule gives it:\s+(--allow \S+)", capsys.readouterr().out)
    assert advised is not None
    (method,) = plan(*given, *shlex.split(advised[1]))
    assert len(method["partitions"]) == 1 and not method["host"]


def test_compile_specs_come_from_texts_and_files(folder: Path) -> None:
    (folder / "table.bin").write_bytes(b"\xff\0")
    given = "to=npu,op=aten.sin,compile_specs={device:CPU,level:2,table:@table.bin}"
    option = "./mine.py:Sines:level=2,compile_specs={mode:fast}"
    arguments = type("Arguments", (), {"partitioner": [option], "rules": [f"pin {given}"]})
    made = partitioning.read_choice(arguments, ["forward"]).make()
    (ruled,) = made["partitioners"]["forward"]
    specs = ruled.rules[0].compile_specs
    assert specs == (CompileSpec("device", b"CPU"), CompileSpec("level", b"2"), CompileSpec("table", b"\xff\0"))


def test_lower_requires_a_coverage_before_a_backend_is_called(told: Callable[..., str], folder: Path) -> None:
    said = told("lower", "model.pt2", "-p", "./mine.py:Sines:level=2", "-o", "x.pte", "--require-coverage", "0.9")
    assert "operators are delegated" in said and "or relax --require-coverage." in said
    assert not (folder / "x.pte").exists()


def test_settings_in_a_file_are_what_was_given(
    plan: Plan, folder: Path, told: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["a=model.pt2", "b=model.pt2", "-p", "xnnpack", "--pin", "to=host,op=aten.sin,method=b", "--no-cache"]
    assert cli.main(["lower", *given, "-o", "x.pte", "--save-config", "s.toml", "--trust"]) == 0
    text = (folder / "s.toml").read_text()
    assert 'models = ["a=model.pt2", "b=model.pt2"]' in text and "no-cache = true" in text and "trust" not in text
    assert 'rules = ["pin to=host,op=aten.sin,method=b"]' in text
    assert plan("--config", "s.toml") == plan(*given[:-1])
    # What is given goes first; a cache excludes that there is none.
    (one,) = plan("model.pt2", "--config", "s.toml", "--deny", "op=aten.relu")
    assert [node["operator"] for node in one["host"]] == ["aten.relu.default"]
    assert cli.main(["lower", "--config=s.toml", "-oy.pte", "--cache", "kept"]) == 0
    assert (folder / "kept").is_dir() and (folder / "y.pte").read_bytes() == (folder / "x.pte").read_bytes()
    assert "there is no directory" in told("plan", "model.pt2", "--save-config", "no/s.toml")


def test_settings_that_are_wrong(told: Callable[..., str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, part in {
        "partitionr = ['xnnpack']": "s.toml: partitionr: no setting has this name. Did you mean 'partitioner'?",
        "partitioner = 'xnnpack'": "expected a list of strings",
        "costs = ['a']": "expected a string or a number",
        "rules = ['refuse op=x']": 'expected rules such as "deny op=aten.add"',
        "trust = true": "only be given on the command line",
        "config = 'other.toml'": "only be given on the command line",
        "partitioner = ['./mine.py:Sines:level=2']": "would run code that a file names",
        "partitioner = ['os:system:command=ls']": "would run code that a file names",
        "models = [": "it is not a TOML file",
    }.items():
        (folder / "s.toml").write_text(text)
        message = told("plan", "model.pt2", "--config", "s.toml")
        assert part in message and message.startswith("exir-lower plan: "), message
    (folder / "s.toml").write_text("partitioner = ['./mine.py:Sines:level=2']")
    assert cli.main(["plan", "model.pt2", "--config", "s.toml", "--trust"]) == 0
    assert "There is no file 'none.toml'" in told("plan", "--config", "none.toml")


@pytest.mark.parametrize("name", ['with "quotes" and \\', "tab\tnewline\n", "ä €\U0001f600\x7f\x1b", "=[]{},'#"])
def test_any_text_comes_back_from_a_file(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "model.pt2", "--assume", f"{name}=finite", "--save-config", "s.toml"]) == 2
    assert not (folder / "s.toml").exists()
    (folder / "odd").mkdir()
    odd = Path("odd") / f"{name.replace('/', '')}.pt2"
    odd.symlink_to((folder / "model.pt2").resolve())
    assert cli.main(["plan", f"m={odd}", "--save-config", "s.toml"]) == 0
    assert tomllib.loads((folder / "s.toml").read_text(encoding="utf-8")) == {"models": [f"m={odd}"]}
    assert cli.main(["plan", "--config", "s.toml"]) == 0


def test_variants(plan: Plan, told: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    mine = "npu=./mine.py:Sines:level=2,backend=reference"
    methods = plan("model.pt2", "--variant", f"{mine},xnnpack", "--variant", "cpu=xnnpack", "--variant", "host=")
    assert [(one["name"], sorted(set(backends(one)))) for one in methods] == [
        ("forward@npu", ["XnnpackBackend", "reference"]),
        ("forward@cpu", ["XnnpackBackend"]),
        ("forward@host", []),
    ]
    (method,) = plan("model.pt2", "--variant", mine, "--variant", "npu=forward=xnnpack", "--deny", "op=aten.relu")
    assert sorted(set(backends(method))) == ["XnnpackBackend", "reference"]
    assert "takes the place of -p" in told("plan", "model.pt2", "-p", "xnnpack", "--variant", "cpu=xnnpack")
    assert "expected NAME=PARTITIONER" in told("plan", "model.pt2", "--variant", "cpu")
    assert "got the name 'a@b'" in told("plan", "model.pt2", "--variant", "a@b=xnnpack")
    assert "there is no method 'x'" in told("plan", "model.pt2", "--variant", "cpu=x=xnnpack")
    lowering = ("lower", "model.pt2", "--variant", f"{mine},xnnpack", "--variant", "cpu=xnnpack", "-o", "m.pte")
    assert cli.main([*lowering, "--save-config", "s.toml"]) == 0
    assert "would run code that a file names" in told("plan", "--config", "s.toml")
    assert [one["name"] for one in plan("--config", "s.toml", "--trust")] == ["forward@npu", "forward@cpu"]
    capsys.readouterr()
    assert cli.main(["run", "m.pte", "--input", "ones:2x8", "--compare", "model.pt2"]) == 0
    assert "forward is forward@npu: the first whose backends are available." in capsys.readouterr().out
    assert cli.main(["run", "m.pte", "--method", "forward@cpu", "--input", "ones:2x8"]) == 0
    assert "forward@npu" not in capsys.readouterr().out
