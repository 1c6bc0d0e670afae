"""The wheel holds the package and nothing else, the sdist what builds and tests it; both can be published."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from folders import ROOT
from fresh_environment import FreshEnvironment, build_sdist, build_wheel, copy_tracked

CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())


PLUGIN_FOLDERS = ("backends", "partitioners")
TEMPLATE = "docs/examples/tinyvec"
"""What `exir-lower new-backend` copies is in the wheel, too."""


def _packages_on_disk() -> set[str]:
    found = set()
    for folder, name in (
        (ROOT / "exir_lowering", "exir_lowering"),
        (ROOT / "backends", "exir_lowering.backends"),
        (ROOT / "partitioners", "exir_lowering.partitioners"),
        (ROOT / TEMPLATE, "exir_lowering.cli.template"),
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


def test_the_classifiers_name_each_python_that_is_allowed() -> None:
    lowest, highest = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", CONFIG["project"]["requires-python"]).groups()
    named = [one for one in CONFIG["project"]["classifiers"] if one.startswith("Programming Language :: Python :: 3.")]
    assert named == [f"Programming Language :: Python :: 3.{minor}" for minor in range(int(lowest), int(highest))]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git tracks."""
    return copy_tracked(ROOT, tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist; it is built before a wheel leaves something in the source."""
    pytest.importorskip("setuptools", minversion="77")
    return build_sdist(source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the sdist holds."""
    target = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(sdist, target)
    (folder,) = target.iterdir()
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy of what git tracks."""
    return build_wheel(copy_tracked(ROOT, tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> FreshEnvironment:
    """An environment that sees the wheel and the dependencies, but not the tree."""
    return FreshEnvironment(tmp_path_factory.mktemp("fresh") / "env", wheel)


def test_twine_finds_nothing_wrong(wheel: Path, sdist: Path) -> None:
    pytest.importorskip("twine", reason="the extra 'lint' is not installed")
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", str(wheel), str(sdist)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_the_wheel_holds_each_file_of_the_package_and_no_other(source: Path, wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    inside = [name for name in _files(source) if name.startswith(("exir_lowering/", "backends/", "partitioners/"))]
    package = [name if name.startswith("exir_lowering/") else f"exir_lowering/{name}" for name in inside]
    package += [f"exir_lowering/cli/template{name}" for name in _under(source, TEMPLATE)]
    about = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    folder = f"exir_lowering-{CONFIG['project']['version']}.dist-info"
    assert sorted(names) == sorted([*package, *(f"{folder}/{name}" for name in about)])
    assert {"exir_lowering/py.typed", "exir_lowering/runtime/native/shim.cpp"} <= set(names)


def _under(source: Path, folder: str) -> list[str]:
    return [name.removeprefix(folder) for name in _files(source) if name.startswith(f"{folder}/")]


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_sdist_holds_what_is_needed_to_build_and_test_it_and_no_more(source: Path, unpacked: Path) -> None:
    made = "exir_lowering.egg-info/"
    tracked = {name for name in _files(source) if not name.startswith((".ci/", ".git", made))}
    assert {"LICENSE", "exir_lowering/py.typed", "tests/conftest.py"} <= tracked
    found = {name for name in _files(unpacked) if not name.startswith(made)}
    assert found == tracked | {"PKG-INFO", "setup.cfg"}


def test_the_sdist_builds_the_same_wheel(unpacked: Path, wheel: Path, tmp_path: Path) -> None:
    names = [set(zipfile.ZipFile(one).namelist()) for one in (build_wheel(unpacked, tmp_path), wheel)]
    assert names[0] == names[1]


def test_the_wheel_works_outside_of_the_tree(fresh: FreshEnvironment, source: Path, tmp_path: Path) -> None:
    """Import every public name, and ask for the plug-ins."""
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
    made = fresh.run("exir-lower", "new-backend", "my_npu", "--cpp", cwd=tmp_path)
    assert made.returncode == 0, made.stderr[-2000:]
    assert len(_files(tmp_path / "my_npu")) == len(_under(source, TEMPLATE))
    as_module = fresh.run("python", "-m", "exir_lowering", "--version")
    assert as_module.stdout.startswith("exir-lower "), as_module.stderr[-2000:]
