"""The wheel holds every package and every public name, the sdist what is needed to build and test it."""

import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from folders import ROOT
from fresh_environment import FreshEnvironment, build_sdist, build_wheel, copy_tracked

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())


PLUGIN_FOLDERS = ("backends", "partitioners")


def _packages_on_disk() -> set[str]:
    found = set()
    for folder, name in (
        (ROOT / "exir_lowering", "exir_lowering"),
        (ROOT / "backends", "exir_lowering.backends"),
        (ROOT / "partitioners", "exir_lowering.partitioners"),
    ):
        # Folders without modules, too: to setuptools they are packages, and it warns of those that are not in the list.
        for inside in {path.parent for path in folder.rglob("*") if path.is_file()}:
            parts = inside.relative_to(folder).parts
            if "__pycache__" in parts or (folder.name == "exir_lowering" and parts and parts[0] in PLUGIN_FOLDERS):
                continue
            found.add(".".join((name, *parts)))
    return found


def test_the_packages_list_equals_the_folders() -> None:
    assert set(CONFIG["tool"]["setuptools"]["packages"]) == _packages_on_disk()


def test_plugin_folders_are_symlinked_into_the_package() -> None:
    for name in PLUGIN_FOLDERS:
        link = ROOT / "exir_lowering" / name
        assert os.readlink(link) == f"../{name}"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git tracks."""
    return copy_tracked(ROOT, tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an sdist holds, unpacked; it is built before a wheel leaves something in the source."""
    pytest.importorskip("setuptools", minversion="77")
    target = tmp_path_factory.mktemp("sdist")
    shutil.unpack_archive(build_sdist(source, target), target)
    (folder,) = (path for path in target.iterdir() if path.is_dir())
    return folder


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
        if not (folder == "exir_lowering" and path.relative_to(ROOT).parts[1] in PLUGIN_FOLDERS)
    }
    expected = {name if name.startswith("exir_lowering") else f"exir_lowering/{name}" for name in expected}
    assert sorted(names) == sorted(expected)
    files = set(zipfile.ZipFile(wheel).namelist())
    assert {"exir_lowering/py.typed", "exir_lowering/runtime/native/shim.cpp"} <= files
    assert any(name.endswith("/licenses/LICENSE") for name in files)


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_sdist_holds_what_is_needed_to_build_and_test_it(source: Path, sdist: Path) -> None:
    packaging = {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md", "SECURITY.md"}
    folders = ("exir_lowering/", "backends/", "partitioners/", "tests/", "docs/")
    expected = {name for name in _files(source) if name in packaging | {"pyproject.toml"} or name.startswith(folders)}
    assert any(name.endswith(".pyi") for name in expected)
    assert {"exir_lowering/runtime/native/shim.cpp", "exir_lowering/py.typed", "tests/conftest.py"} <= expected
    assert not expected - _files(sdist)


def test_the_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    names = [set(zipfile.ZipFile(one).namelist()) for one in (build_wheel(sdist, tmp_path), wheel)]
    assert names[0] == names[1]


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
