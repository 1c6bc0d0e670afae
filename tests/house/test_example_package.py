"""A third-party package, installed into a fresh environment: it is listed, found by name, lowers, executes."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from folders import ROOT
from fresh_environment import FreshEnvironment, build_wheel, copy_tracked

EXAMPLE = ROOT / "docs" / "examples" / "tinyvec"
PAGE = (EXAMPLE / "README.md").read_text()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> FreshEnvironment:
    """The engine and the example, both from what git has of them; the example's dependencies are resolved by pip."""
    made = tmp_path_factory.mktemp("example")
    wheels = {}
    for name, folder in (("engine", ROOT), ("example", EXAMPLE)):
        source = copy_tracked(folder, made / name / "source")
        wheels[name] = build_wheel(source, made / name / "wheel")
    fresh = FreshEnvironment(made / "env", wheels["engine"])
    fresh.install(wheels["example"], "--dry-run")  # what it depends on is there
    fresh.install(wheels["example"], "--no-deps", "--ignore-installed")  # even where a developer has it installed
    return fresh


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has of the package nothing but its demo, its tests and its C++."""
    folder = tmp_path_factory.mktemp("outside")
    copy_tracked(EXAMPLE / "tests", folder / "tests")
    copy_tracked(EXAMPLE / "cpp", folder / "cpp")
    shutil.copy2(EXAMPLE / "demo.py", folder)
    return folder


@pytest.fixture(scope="module")
def shown(environment: FreshEnvironment, folder: Path) -> dict[str, str]:
    """What each command of its README shows, in order; by the command and its first argument."""
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    shown = {}
    for line in block.splitlines():
        command, *arguments = shlex.split(line)
        done = environment.run(command, *arguments, cwd=folder)
        assert done.returncode == 0, (line, done.stderr[-2000:])
        shown[f"{command} {arguments[0]}"] = done.stdout
    return shown


def test_nothing_comes_from_the_tree(environment: FreshEnvironment, folder: Path) -> None:
    script = "import exir_lowering, tinyvec; print(exir_lowering.__file__, tinyvec.__file__)"
    done = environment.run("python", "-c", script, cwd=folder)
    assert done.stdout.split() == [f"{environment.site}/{name}/__init__.py" for name in ("exir_lowering", "tinyvec")]


def test_its_plugins_are_listed_as_ok(shown: dict[str, str]) -> None:
    rows = [line.split() for line in shown["exir-lower plugins"].splitlines() if " tinyvec " in line]
    assert [(kind, name, state) for kind, name, *_, state in rows] == [
        ("backend", "tinyvec", "ok"),
        ("delegate", "tinyvec", "ok"),
        ("partitioner", "tinyvec", "ok"),
    ]


def test_a_script_lowers_saves_loads_and_executes(shown: dict[str, str]) -> None:
    """The script itself compares with eager PyTorch, and fails when the outputs differ."""
    assert "1 x tinyvec" in shown["python demo.py"] and "equal to eager PyTorch" in shown["python demo.py"]


def test_the_command_line_plans_lowers_and_runs(
    environment: FreshEnvironment, shown: dict[str, str], folder: Path
) -> None:
    for command in ("plan", "lower"):
        assert "1 x tinyvec" in shown[f"exir-lower {command}"]
    assert b"tinyvec" in (folder / "model.pte").read_bytes()
    assert torch.load(folder / "outputs.pt")[0].shape == (2, 4)
    verified = environment.run("exir-lower", "verify", "model.pte", "model.pt2", cwd=folder)
    assert verified.returncode == 0, verified.stdout


def test_it_passes_its_own_tests(environment: FreshEnvironment, folder: Path) -> None:
    """Of the conformance suite a part only: its other cases say the same of any backend."""
    options = ("-q", "-p", "no:cacheprovider", "-k", "not conformance or ops or errors or life")
    done = environment.run("python", "-m", "pytest", *options, "tests", cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d+ passed", done.stdout) and "failed" not in done.stdout


def test_its_readme_names_each_file() -> None:
    kept = [
        path for path in EXAMPLE.rglob("*.*") if path.suffix in (".py", ".cpp", ".h") and path.parent.name != "tests"
    ]
    assert not [path.name for path in kept if f"{path.relative_to(EXAMPLE)}`" not in PAGE]
