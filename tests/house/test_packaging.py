"""The wheel holds every package and every public name, the sdist what is needed to build and test it."""

import os
import sys
import zipfile
from pathlib import Path

import pytest
from folders import ROOT
from fresh_environment import FreshEnvironment, build_wheel, copy_tracked

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _packages_on_disk() -> set[str]:
    found = set()
    for folder, name in (
        (ROOT / "exir_lowering", "exir_lowering"),
        (ROOT / "backends", "exir_lowering.backends"),
        (ROOT / "partitioners", "exir_lowering.partitioners"),
    ):
        for init in folder.rglob("__init__.py"):
            parts = init.parent.relative_to(folder).parts
            if folder.name == "exir_lowering" and parts and parts[0] in ("backends", "partitioners"):
                continue
            found.add(".".join((name, *parts)))
    return found


def test_the_packages_list_equals_the_folders() -> None:
    assert set(CONFIG["tool"]["setuptools"]["packages"]) == _packages_on_disk()


def test_plugin_folders_are_symlinked_into_the_package() -> None:
    for name in ("backends", "partitioners"):
        link = ROOT / "exir_lowering" / name
        assert os.readlink(link) == f"../{name}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy of what git tracks."""
    return build_wheel(copy_tracked(ROOT, tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("target"))


def test_the_wheel_holds_every_module_once(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    expected = {
        str(Path(*(part for part in path.relative_to(ROOT).parts)))
        for folder in ("exir_lowering", "backends", "partitioners")
        for path in (ROOT / folder).rglob("*.py")
        if not (folder == "exir_lowering" and path.relative_to(ROOT).parts[1] in ("backends", "partitioners"))
    }
    expected = {name if name.startswith("exir_lowering") else f"exir_lowering/{name}" for name in expected}
    assert sorted(names) == sorted(expected)
    files = set(zipfile.ZipFile(wheel).namelist())
    assert {"exir_lowering/py.typed", "exir_lowering/runtime/shim.cpp"} <= files
    assert any(name.endswith("/licenses/LICENSE") for name in files)


def test_the_wheel_works_outside_of_the_tree(wheel: Path, tmp_path: Path) -> None:
    """Install into a fresh environment that sees the dependencies, but not the tree; import every public name."""
    fresh = FreshEnvironment(tmp_path / "env", wheel)
    script = (
        "import exir_lowering, sys, importlib.metadata as m\n"
        "from exir_lowering import *\n"
        "import exir_lowering.compat, exir_lowering.cli, exir_lowering.backends.echo, exir_lowering.partitioners\n"
        "missing = [n for n in exir_lowering.__all__ if not hasattr(exir_lowering, n)]\n"
        "assert '<html' in exir_lowering.LoweringPlan(()).to_html()\n"
        "print(exir_lowering.__file__, missing)\n"
    )
    done = fresh.run("python", "-c", script)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == f"{fresh.site}/exir_lowering/__init__.py []"
    listed = fresh.run("exir-lower", "plugins")
    assert listed.returncode == 0, listed.stderr[-2000:]
    assert "echo" in listed.stdout and "xnnpack" in listed.stdout
    as_module = fresh.run("python", "-m", "exir_lowering", "--version")
    assert as_module.stdout.startswith("exir-lower "), as_module.stderr[-2000:]
