"""The command line: what it prints, its exit codes, and that a mistake is one paragraph."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import forked
import pytest
import torch
from torch.export import Dim, ExportedProgram, export

import exir_lowering
from exir_lowering import InvariantError, cli, lower
from exir_lowering.errors import BackendFailure
from exir_lowering.partitioners import SupportPartitioner, everything
from exir_lowering.plugins.registry import PluginInfo

Main = Callable[..., tuple[int, str, str]]
RUN = "import sys\nfrom exir_lowering.cli import main\nsys.exit(main())"
CLOSED = """
import os, sys
reading, writing = os.pipe()
os.close(reading)
os.dup2(writing, 1)
sys.stdout = os.fdopen(1, "w")
"""
PAGE = re.compile(r"\nSee docs/errors/(\w+)\.md\n$")
SLOW = """
import time
from exir_lowering.cli import program_files

def work(_):
    print("ready", flush=True)
    time.sleep(60)

program_files.find_programs = work
"""


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + 1


class Mixed(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x * n, x.to(torch.int64) > 0


def program(rows: int = 2, *, dynamic: bool = False) -> ExportedProgram:
    shapes = ({0: Dim("rows", min=1, max=16)},) if dynamic else None
    return export(Net().eval(), (torch.randn(rows, 8),), dynamic_shapes=shapes)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    torch.export.save(program(), folder / "net.pt2")
    torch.export.save(program(3), folder / "three.pt2")
    torch.export.save(program(dynamic=True), folder / "dynamic.pt2")
    torch.export.save(export(Mixed(), (torch.randn(3), 2)), folder / "mixed.pt2")
    return folder


@pytest.fixture(scope="module")
def pte(models: Path) -> Path:
    """Two methods, "small" and "large", the second with a dynamic shape."""
    target = models / "two.pte"
    small, large = f"small={models / 'net.pt2'}", f"large={models / 'dynamic.pt2'}"
    assert cli.main(["lower", small, large, "-p", "xnnpack", "-o", str(target)]) == 0
    return target


@pytest.fixture
def main(capsys: pytest.CaptureFixture[str]) -> Main:
    def run(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(a) for a in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def command(*argv: object, code: str = RUN, **options: object) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "timeout": 120, **options}
    line = [sys.executable, "-c", code, *map(str, argv)]
    return subprocess.run(line, **options)  # type: ignore[call-overload,no-any-return]


def refused(result: tuple[int, str, str], *parts: str, code: int = 2) -> str:
    """Check that a command was refused with one paragraph that has all parts, and the page about it."""
    got, out, err = result
    assert (got, out) == (code, "")
    assert "Traceback" not in err
    assert err.startswith("exir-lower ") and err.count("\n") == (2 if PAGE.search(err) else 1), err
    for part in parts:
        assert part in err
    return err


# ---- help and usage


def test_help_and_usage_come_without_torch(tmp_path: Path) -> None:
    run = "import sys\nfrom exir_lowering.cli import main\ncode = main()"
    garbage, lowered, archive = (tmp_path / name for name in ("garbage.pt2", "lowered.pt2", "archive.pt2"))
    garbage.write_bytes(b"no zip file" * 9)
    lowered.write_bytes(b"\0\0\0\0ET12")
    zipfile.ZipFile(archive, "w").close()
    check = "\nassert not {'torch', 'executorch', *light} & set(sys.modules), 'imported'\nsys.exit(code)"
    for argv, code, part in (
        (["--help"], 0, "examples:"),
        (["lower", "--help"], 0, "--partitioner"),
        (["--version"], 0, metadata.version("exir-lowering")),
        (["lower", tmp_path / "none.pt2", "-o", "x.pte"], 2, "There is no file"),
        (["run", tmp_path / "none.pte"], 2, "There is no file"),
        (["run", tmp_path, "--json"], 2, "is a directory"),
        (["demo", "-o", "x.bin"], 2, "ends in .pte"),
        (["plan", garbage], 2, "it is another kind of file"),
        (["plan", lowered], 2, "it is a .pte file, already lowered"),
        (["plan", archive, "-p", "xnpack"], 2, "Did you mean 'xnnpack'?"),
        (["bisect", archive, "-p", "nowhere:partitioner"], 2, "No module named 'nowhere'"),
        (["lower", archive, "-o", tmp_path / "x.pte", "--rewrites", "saef"], 2, "Did you mean 'safe'?"),
        (["lower", archive, "-o", tmp_path / "x.pte", "--require-memory", "8 potatoes"], 2, "expected a number"),
        ([], 2, "COMMAND"),
    ):
        light = "\nlight = ['rich']" if "--help" in argv else "\nlight = []"
        done = command(*argv, code=run + light + check)
        assert done.returncode == code, done.stderr
        assert part in done.stdout + done.stderr


def test_python_m_is_the_same_command_line() -> None:
    for argv in (["-m", "exir_lowering"], ["-c", RUN]):
        done = subprocess.run([sys.executable, *argv, "--help"], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and done.stdout.startswith("usage: exir-lower "), done.stderr


COMMANDS = ["lower", "plan", "quantize", "run", "inspect", "check", "verify", "bisect", "bench"]
COMMANDS += ["plugins", "cache", "doctor", "demo"]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself(main: Main, name: str) -> None:
    code, out, _ = main(name, "--help")
    assert code == 0 and f"usage: exir-lower {name}" in out
    assert name == "plugins" or "examples:" in out


@pytest.mark.parametrize("argv", [[], ["lower"], ["lower", "x.pt2"], ["nonsense"], ["run", "x.pte", "--seed", "x"]])
def test_wrong_usage_is_a_mistake(main: Main, argv: list[str]) -> None:
    code, out, err = main(*argv)
    assert (code, out) == (2, "") and "usage: exir-lower" in err


# ---- lower


def test_lower_prints_json_and_nothing_else_on_stdout(main: Main, models: Path, tmp_path: Path) -> None:
    target = tmp_path / "net.pte"
    code, out, err = main("lower", models / "net.pt2", "-p", "xnnpack", "-o", target, "--json")
    assert code == 0 and str(target) in err
    (method,) = json.loads(out)["methods"]
    assert method["name"] == "forward" and method["partitions"][0]["backend_id"] == "XnnpackBackend"


def test_lower_without_a_partitioner_keeps_all_on_the_host(main: Main, models: Path, tmp_path: Path) -> None:
    code, out, _ = main("lower", f"step={models / 'net.pt2'}", "-o", tmp_path / "net.pte")
    assert code == 0 and "step" in out and "none" in out and "0.0%" in out


def test_lower_tells_that_operators_stay_on_the_host(main: Main, models: Path, tmp_path: Path) -> None:
    code, out, _ = main("lower", models / "mixed.pt2", "-p", "xnnpack", "-o", tmp_path / "mixed.pte")
    assert code == 0 and "operators stay on the host; `exir-lower plan`" in out


def test_lower_keeps_the_file_that_was_there_when_it_fails(main: Main, models: Path, tmp_path: Path) -> None:
    target = tmp_path / "net.pte"
    target.write_bytes(b"kept")
    refused(main("lower", models / "net.pt2", "-p", "nobody", "-o", target), "'nobody'", "xnnpack")
    assert target.read_bytes() == b"kept" and list(tmp_path.iterdir()) == [target]


def test_a_file_with_an_equals_sign_in_its_name(main: Main, models: Path, tmp_path: Path) -> None:
    odd = tmp_path / "a=b.pt2"
    odd.write_bytes((models / "net.pt2").read_bytes())
    code, out, _ = main("lower", odd, "-o", tmp_path / "x.pte")
    assert code == 0 and "forward" in out


def test_a_method_name_that_no_method_can_have(main: Main, models: Path, tmp_path: Path) -> None:
    net, target = models / "net.pt2", tmp_path / "x.pte"
    refused(main("lower", f"two words={net}", "-o", target), "'two words'", "without spaces")
    refused(main("lower", f"={net}", "-o", target), f"There is no file '={net}'")
    assert main("lower", f"with-a-hyphen={net}", "-o", target)[0] == 0 and target.exists()


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("garbage.pt2", b"no zip file" * 9, "another kind of file"),
        ("empty.pt2", b"", "it is empty"),
        ("half.pt2", None, "damaged, or cut short"),
        ("lowered.pt2", b"\0\0\0\0ET12", "it is a .pte file"),
    ],
)
def test_a_file_that_is_no_program(
    main: Main, models: Path, tmp_path: Path, name: str, content: bytes | None, part: str
) -> None:
    path, whole = tmp_path / name, (models / "net.pt2").read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    refused(main("lower", path, "-o", tmp_path / "x.pte"), repr(str(path)), part, "torch.export.save")
    assert not (tmp_path / "x.pte").exists()


def test_paths_and_names_that_are_wrong(main: Main, models: Path, tmp_path: Path) -> None:
    net, out = models / "net.pt2", tmp_path / "x.pte"
    refused(main("lower", tmp_path / "no" / "a.pt2", "-o", out), "There is no file", "no directory")
    refused(main("lower", tmp_path, "-o", out), "is a directory, expected a file")
    refused(main("lower", net, "-o", tmp_path / "no" / "x.pte"), "no directory", "Create it first")
    refused(main("lower", net, "-o", tmp_path / "x.bin"), "ends in .pte")
    (tmp_path / "d.pte").mkdir()
    refused(main("lower", net, "-o", tmp_path / "d.pte"), "it is a directory")
    refused(main("lower", net, models / "three.pt2", "-o", out), "expected METHOD=FILE", f"net={net}")
    refused(main("lower", f"a={net}", f"a={net}", "-o", out), "'a' is given twice")
    assert not out.exists()


def test_debug_shows_the_traceback(main: Main, models: Path, tmp_path: Path) -> None:
    for argv in (["--debug", "lower"], ["lower", "--debug"]):
        code, _, err = main(*argv, models / "net.pt2", "-o", tmp_path / "no" / "x.pte")
        assert code == 2 and "Traceback" in err and err.splitlines()[-2].startswith("exir-lower lower: ")
        assert PAGE.findall(err) == ["InputError"]


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [
        (BackendFailure("Backend 'b' raised."), 2, "Backend 'b' raised."),
        (InvariantError("Please report this."), 1, "Please report this."),
        (ZeroDivisionError("by zero"), 1, "unexpected ZeroDivisionError: by zero"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_the_exit_code_tells_whose_mistake_it_is(
    main: Main,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    part: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("exir_lowering.pipeline.lower", fail)
    got, out, err = main("lower", models / "net.pt2", "-o", tmp_path / "x.pte")
    assert (got, out) == (code, "") and part in err and "Traceback" not in err
    assert bool(err) == bool(part)


@pytest.mark.parametrize("argv", [["--help"], ["plugins"]])
def test_a_closed_pipe_is_no_traceback(argv: list[str]) -> None:
    done = forked.run(CLOSED + RUN, *argv)
    # argparse itself ignores that its help cannot be written.
    assert done.returncode == 141 or argv == ["--help"]
    assert done.stderr == ""


def test_interrupting_is_quiet() -> None:
    started = subprocess.Popen(
        [sys.executable, "-c", SLOW + RUN, "lower", "x.pt2", "-o", "x.pte"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None and started.stdout.readline() == "ready\n"
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=60)
    assert (started.returncode, err) == (130, "")


# ---- plan


def test_plan_prints_the_partitions_and_the_reasons(main: Main, models: Path) -> None:
    code, out, err = main("plan", models / "mixed.pt2", "-p", "xnnpack")
    assert (code, err) == (0, "")
    for part in (
        "Lowering plan",
        "XnnpackBackend",
        "XnnpackPartitioner has no configuration for",
        "(test_cli.py:",
    ):
        assert part in " ".join(out.split()), out
    assert len(out.splitlines()) <= 25
    everything = main("plan", models / "mixed.pt2", "-p", "xnnpack", "--all")[1]
    assert f"{__file__}:" in everything and "Partitions (" in everything


def test_plan_prints_json_and_nothing_else_on_stdout(main: Main, models: Path) -> None:
    code, out, err = main("plan", f"a={models / 'net.pt2'}", f"b={models / 'mixed.pt2'}", "-p", "xnnpack", "--json")
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert [method["name"] for method in data["methods"]] == ["a", "b"]
    assert data["methods"][0]["coverage"]["weights"] > 0.9
    assert all(node["reasons"] for node in data["methods"][1]["host"])


def test_rewrites_and_assumptions_are_chosen_by_name(main: Main, models: Path) -> None:
    def plan(*options: str) -> list[str]:
        (method,) = json.loads(main("plan", models / "mixed.pt2", "--json", *options)[1])["methods"]
        return [one["rewrite"] for one in method["rewritings"]]

    assert plan() == plan("--rewrites", "safe") != [] == plan("--rewrites", "none")
    refused(main("plan", models / "mixed.pt2", "--rewrites", "sage"), "safe")
    refused(main("plan", models / "mixed.pt2", "--assume", "x"), "INPUT=PROPERTY")
    refused(main("plan", models / "mixed.pt2", "--assume", "x=big"), "finite_rows")
    refused(main("plan", models / "mixed.pt2", "--assume", "nothing=finite"), "no method has an input 'nothing'")


def test_plan_says_what_lower_does(main: Main, models: Path, tmp_path: Path) -> None:
    planned = json.loads(main("plan", models / "mixed.pt2", "-p", "xnnpack", "--json")[1])
    target, page = tmp_path / "m.pte", tmp_path / "m.html"
    argv = ("lower", models / "mixed.pt2", "-p", "xnnpack", "-o", target, "--json", "--html", page)
    lowered = json.loads(main(*argv)[1])
    # Only a plan estimates what a method takes on a device: of a file, `inspect` says it.
    assert [one["memory"].pop("device")["peak"] > 0 for one in planned["methods"]] == [True]
    assert [one["memory"].pop("device") for one in lowered["methods"]] == [None]
    assert lowered["methods"] == planned["methods"]
    assert main("plan", *argv[1:4], "--html", tmp_path / "plan.html")[0] == 0
    text, found = re.subn(", [^ ]+ k?B in all", "", (tmp_path / "plan.html").read_text())
    assert found and page.read_text() == text  # from one conversion
    told = {"payload_bytes", "seconds", "left_to_executorch", "cache", "switched_off", "states", "refused"}
    told |= {"narrowed", "warnings"}
    assert set(lowered) == {"version", "versions", "methods", *told}


def test_plan_requires_a_coverage(main: Main, models: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    code, out, err = main("plan", models / "mixed.pt2", "-p", "xnnpack", "--require-coverage", "1", "--html", page)
    assert code == 2 and "Lowering plan" in out and page.exists()
    assert "operators are delegated" in err and "required: 100.0%" in err and "Traceback" not in err
    assert main("plan", models / "net.pt2", "-p", "xnnpack", "--require-coverage", "0.6")[0] == 0
    refused(main("plan", models / "net.pt2", "-p", "xnnpack", "--require-coverage", "7"), "share between 0 and 1")


def test_plan_and_lower_bound_the_memory(main: Main, models: Path, tmp_path: Path) -> None:
    file = tmp_path / "net.pte"
    for words in (("plan",), ("lower", "-o", file)):
        code, _, err = main(*words, models / "net.pt2", "-p", "xnnpack", "--require-memory", "16B")
        assert code != 0 and "ExecuTorch's runtime allocates" in err and "at most 16 B" in err and not file.exists()
        refused(main(*words, models / "net.pt2", "--require-memory", "16 XB"), "'8 MB' or '512 KiB'")
    code, out, _ = main(
        *("lower", models / "net.pt2", "-o", file, "--memory-planner", "naive", "--require-memory", "1MiB")
    )
    assert code == 0 and file.exists() and "forward: planned memory " in out


def test_plans_that_are_wrong(main: Main, models: Path, tmp_path: Path) -> None:
    refused(main("plan", models / "net.pt2", "-p", "xnnpak"), "'xnnpak'", "'xnnpack'")
    refused(main("plan", models / "no.pt2"), "There is no file")
    refused(main("plan", models / "net.pt2", "--html", tmp_path / "x.htm"), "ends in .html")
    refused(main("plan", models / "net.pt2", "--dot", tmp_path / "no" / "x.dot"), "there is no directory")


# ---- run


def test_run_prints_and_saves_outputs_equal_to_eager(main: Main, pte: Path, tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    torch.save(x, tmp_path / "x.pt")
    argv = ("--method", "small", "--inputs", tmp_path / "x.pt", "--save", tmp_path / "y.pt")
    code, out, err = main("run", pte, *argv)
    assert (code, err) == (0, "")
    (y,) = torch.load(tmp_path / "y.pt")
    code, limited, err = main("run", pte, *argv, "--timeout", 60)
    assert (code, err, limited) == (0, "", out) and torch.equal(torch.load(tmp_path / "y.pt")[0], y)
    expected = Net()(x)
    assert torch.allclose(y, expected, atol=1e-5)
    assert "float32" in out and "2x4" in out and str(tmp_path / "y.pt") in out
    shown = [float(cell) for cell in next(line for line in out.splitlines() if "2x4" in line).split()[-3:]]
    assert shown == pytest.approx([v.item() for v in (expected.min(), expected.mean(), expected.max())], abs=1e-4)


@pytest.mark.parametrize("given", [[torch.tensor([1.0, -2.0, 3.0]), 2], [(torch.tensor([1.0, -2.0, 3.0]), 2)]])
def test_run_takes_numbers_and_shows_every_output(main: Main, models: Path, tmp_path: Path, given: object) -> None:
    assert main("lower", models / "mixed.pt2", "-o", tmp_path / "m.pte")[0] == 0
    torch.save(given, tmp_path / "both.pt")
    code, out, err = main("run", tmp_path / "m.pte", "--inputs", tmp_path / "both.pt")
    assert code == 0, err
    assert "float32" in out and "bool" in out and "-4" in out


def test_random_inputs_are_the_same_each_time(main: Main, pte: Path) -> None:
    argv = ("run", pte, "--method", "small")
    assert main(*argv) == main(*argv)
    assert main(*argv) != main(*argv, "--seed", "1")


def test_inputs_that_are_wrong(main: Main, pte: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(1)}, "weights.pt")
    torch.save(Path, "code.pt")
    torch.save([torch.zeros(3, 8, dtype=torch.int64)], "wrong.pt")
    for given, parts in {
        "none.pt": ("There is no file 'none.pt'",),
        "weights.pt": ("expected a tensor",),
        "code.pt": ("not a torch.save file with only tensors",),
        "wrong.pt": (".to(torch.float32)", "dimension 0 is 3, not 2"),
    }.items():
        code, out, err = main("run", pte, "--method", "small", "--inputs", given)
        assert (code, out) == (2, "") and all(part in err for part in parts), err


def test_runs_that_are_wrong(main: Main, pte: Path, tmp_path: Path) -> None:
    refused(main("run", pte), "there is no method 'forward', so give --method NAME", "'small'", "'large'")
    refused(main("run", pte, "--method", "smal"), "there is no method 'smal'", "'small'")
    refused(main("run", tmp_path / "no.pte"), "There is no file")
    refused(main("run", pte, "--save", tmp_path / "no" / "y.pt"), "no directory")
    refused(main("run", pte, "--data", tmp_path / "no.ptd"), "There is no file")
    refused(main("run", pte, "--method", "small", "--timeout", 0), "Limits(seconds=0.0): expected a finite number")
    half = tmp_path / "half.pte"
    half.write_bytes(pte.read_bytes()[:100])
    refused(main("run", half), "half.pte", "damaged")


@pytest.mark.filterwarnings("always::exir_lowering.errors.BackendUnavailableWarning")
def test_run_falls_back_to_the_original_graphs(main: Main, tmp_path: Path) -> None:
    lowered = lower(program(), SupportPartitioner({"echo": everything()}))
    plain, kept = tmp_path / "plain.pte", tmp_path / "kept.pte"
    lowered.emit().save(plain)
    lowered.emit(keep_originals=True).save(kept)
    torch.save([torch.ones(2, 8)], tmp_path / "x.pt")
    again = ("--inputs", tmp_path / "x.pt", "--unavailable", "fallback")
    err = refused(main("run", kept), "needs the backend 'echo'", "--unavailable fallback", "--keep-originals")
    assert "unavailable=" not in err
    code, out, err = main("run", kept, *again, "--save", tmp_path / "y.pt")
    assert code == 0 and "outputs of forward" in out, err
    assert "Note: " in err and "executed by PyTorch, from their original graphs" in err
    (result,) = torch.load(tmp_path / "y.pt")
    assert torch.allclose(result, Net()(torch.ones(2, 8)), atol=1e-6)
    code, _, err = main("run", plain, *again)
    assert (
        code == 2 and "There is no original graph to fall back to: the file has it" in err and "--keep-originals" in err
    )


def test_weights_beside_the_file(main: Main, models: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.pte"
    for name in ("", ".ptd", "a/b"):
        made = main("lower", models / "net.pt2", "-o", target, "--external-weights", name)
        refused(made, f"--external-weights {name!r}: expected the name of a file")
    refused(main("lower", tmp_path / "bad.pt2", "-o", target, "--external-weights", "a/b"))
    code, out, _ = main("lower", models / "net.pt2", "-p", "xnnpack", "-o", target, "--external-weights", "w", "--json")
    assert code == 0 and json.loads(out)
    refused(main("run", target), "weights", "with --data", "Beside it are: w.ptd")
    code, out, _ = main("run", target, "--data", tmp_path / "w.ptd")
    assert code == 0 and "outputs of forward" in out


# ---- doctor


def test_doctor_says_that_all_is_well(main: Main) -> None:
    code, out, err = main("doctor")
    assert (code, err) == (0, "") and "XnnpackBackend" in out and " off " not in out
    found = json.loads(main("doctor", "--json")[1])
    # A CUDA build says what it was built for in torch.__version__ only.
    assert torch.__version__.startswith(found["versions"]["torch"]) and found["runtime"]["problem"] == ""
    assert {"xnnpack", "reference"} <= {plugin["name"] for plugin in found["plugins"]}
    assert len(found["features"]) > 10 and not any(feature["off"] for feature in found["features"])


def test_doctor_says_what_is_off_and_why(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    recompile = torch.fx.GraphModule.recompile
    monkeypatch.setattr(torch.fx.GraphModule, "recompile", lambda self: recompile(self))
    monkeypatch.setenv("CXX", "no-such-compiler")
    code, out, _ = main("doctor")
    assert code == 0 and "which does not exist" in " ".join(out.split())
    assert "lazy graph code is off: torch.fx.graph_module:GraphModule.recompile differs from the code" in out
    monkeypatch.setenv("EXIR_LOWERING_PLAIN", "1")
    found = json.loads(main("doctor", "--json")[1])
    assert {feature["off"] for feature in found["features"]} == {"EXIR_LOWERING_PLAIN is set"}


# ---- plugins


def test_plugins_lists_what_is_installed(main: Main) -> None:
    code, out, err = main("plugins")
    assert (code, err) == (0, "")
    assert "backends, delegates, partitioners and rewrites" in " ".join(main("plugins", "--help")[1].split())
    for part in ("xnnpack", "echo", "partitioner", "delegate", "backend", "exir-lowering"):
        assert part in out
    assert "--check" in out
    found = json.loads(main("plugins", "--json")[1])
    assert {"group": "exir_lowering.partitioners", "id": "xnnpack", "error": ""}.items() <= {
        k: v for plugin in found if plugin["id"] == "xnnpack" for k, v in plugin.items()
    }.items()


def test_plugins_shows_a_broken_one_with_its_error(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = PluginInfo("exir_lowering.backends", "bad", "somebody 1.0 (bad:Bad)", "'bad': ImportError: no module [x]")

    def installed(*, check: bool) -> list[PluginInfo]:
        print("a plug-in that prints")
        return [broken]

    monkeypatch.setattr("exir_lowering.plugins.registry.list_installed", installed)
    code, out, _ = main("plugins", "--check")
    assert code == 0 and "broken" in out and "Broken: 'bad': ImportError: no module [x]" in out
    assert json.loads(main("plugins", "--json")[1])[0]["error"] == broken.error


def test_plugins_says_that_what_a_plugin_needs_is_not_installed(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "exir_lowering.backends.openvino", raising=False)
    monkeypatch.delitem(sys.modules, "openvino", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *given: None)
    code, out, _ = main("plugins", "--check")
    assert (
        code == 0
        and "not installed" in out
        and "Not installed: The backend 'openvino' needs OpenVINO" in out
        and "broken" not in out
    )


def test_a_misspelt_option_is_an_error(main: Main) -> None:
    for argv, part in (
        ("lower model.pt2 -o model.pte --exernal-weights w", "unrecognized arguments: --exernal-weights w. Did you"),
        ("lower model.pt2 --ouput model.pte", "unrecognized arguments: --ouput. Did you mean '--output'?"),
        ("plan model.pt2 --partitoner xnnpack", "Did you mean '--partitioner'?"),
        ("plan model.pt2 --memory-planner gredy", "Did you mean 'greedy'?"),
        ("lowr model.pt2", "there is no command 'lowr'. Did you mean 'lower'?"),
        ("diff a.pte b.pte", "there is no command 'diff'. Did you mean 'inspect A B'?"),
    ):
        code, out, err = main(*argv.split())
        usage, line = err.splitlines()
        assert (code, out) == (2, "") and usage.startswith("usage: exir-lower") and part in line, err


def test_help_names_what_is_seldom_used(main: Main) -> None:
    code, short, _ = main("lower", "--help")
    assert code == 0 and re.match(r"usage: exir-lower lower -o OUT.pte \S+ \[\S+ ...\] \[options\]\n", short)
    assert "more options, which --help-all describes: --" in short and "--etrecord" in short
    everything = main("lower", "--help-all")[1]
    assert "more options" not in everything and "also write OUT.etrecord" in everything
    assert {*re.findall("--[a-z-]+", everything)} == {*re.findall("--[a-z-]+", short)}
    assert len(everything.splitlines()) > 1.5 * len(short.splitlines())


def test_a_narrow_terminal(main: Main, pte: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for argv in (["plugins"], ["run", pte, "--method", "small"]):
        _, out, _ = main(*argv)
        assert all(len(line) <= 60 for line in out.splitlines() if not line.startswith(("ExecuTorch's", "Broken: ")))


# ---- where nothing can be written


def on_a_full_disk(*argv: object, room: int = 100) -> tuple[int, str]:
    """Run a command in a child whose files may have so many bytes; return its exit code and what it said."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.close(reading)
            sys.stdout = sys.stderr = os.fdopen(writing, "w")
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
            code = cli.main([str(argument) for argument in argv])
            sys.stderr.flush()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as told:
        text = told.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def test_lower_and_run_on_a_full_disk_keep_what_was_there(models: Path, pte: Path, tmp_path: Path) -> None:
    old = {"old.pte": b"the old file", "old.pt": b"the old outputs"}
    for name, content in old.items():
        (tmp_path / name).write_bytes(content)
    for argv in (
        ("lower", models / "net.pt2", "-o", tmp_path / "old.pte"),
        ("run", pte, "--method", "small", "--save", tmp_path / "old.pt"),
    ):
        code, told = on_a_full_disk(*argv)
        assert code == 2 and "Cannot" in told and "File too large" in told, told
        assert "defect" not in told and "Traceback" not in told
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == old


def test_too_little_memory_is_told(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(*, check: bool) -> list[PluginInfo]:
        raise MemoryError

    monkeypatch.setattr("exir_lowering.plugins.registry.list_installed", listed)
    refused(main("plugins"), "exir-lower plugins: there is not enough memory.", code=1)


class Counts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("other", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.other.add_(1.0)
        return self.total.add_(x) * self.other[0]


def test_state_that_methods_of_several_files_share(main: Main, tmp_path: Path) -> None:
    torch.export.save(export(Counts(), (torch.ones(3),)), tmp_path / "counts.pt2")
    target, given = tmp_path / "x.pte", [f"{name}={tmp_path / 'counts.pt2'}" for name in ("first", "second")]

    def lowered(*options: str) -> tuple[str, list[float]]:
        code, out, err = main("lower", *given, "-p", "xnnpack", "-o", target, "--json", *options)
        assert code == 0, err
        loaded = exir_lowering.load(target)
        found = [loaded.run(name, torch.ones(3))[0][0].item() for name in ("first", "second", "first")]
        states = json.loads(out)["states"]
        assert all(state["shared"] is (len(state["names"]) == 2) for state in states)
        return err, found

    err, found = lowered()
    assert "warning: first and second each write a separate 'total' (and other)" in err or (
        "warning: first and second each write a separate 'other' (and total)" in err
    )
    assert "--share-state all" in err and "--share-state none" in err and found == [1, 1, 4]
    for options, expected in (("all", [1, 4, 9]), ("total", [1, 2, 6]), ("none", [1, 1, 4])):
        err, found = lowered("--share-state", options)
        assert "warning" not in err and found == expected, options
    refused(main("lower", *given, "-o", target, "--share-state", "totals"), "--share-state:", "'totals'", "'total'")
