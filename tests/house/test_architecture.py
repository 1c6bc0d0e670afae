"""What keeps the house in order beside the import contracts in pyproject.toml, which `lint-imports` checks."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from folders import ROOT

PACKAGE = ROOT / "exir_lowering"


def _files() -> list[Path]:
    own = [p for p in PACKAGE.rglob("*.py") if p.relative_to(PACKAGE).parts[0] not in ("backends", "partitioners")]
    return own + [p for folder in ("backends", "partitioners") for p in (ROOT / folder).rglob("*.py")]


FILES = _files()


@cache
def _nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


def _imports(path: Path) -> list[tuple[str, str]]:
    """Return (module, name) of every import in a file; name is "" for a plain import."""
    found = []
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


def test_the_import_contracts_hold() -> None:
    """In a process of its own: it disables every logger that there is, and other tests read logs."""
    checker = Path(sys.executable).with_name("lint-imports")
    checked = subprocess.run([checker, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_contracts_about_plugins_name_every_wing() -> None:
    """import-linter refuses a new wing that is in no layer; the other lists follow from the layers."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [name for layer in contracts[0]["layers"] for name in layer.split(" | ")]
    engine = {f"exir_lowering.{name}" for name in layers[layers.index("pipeline") :]}
    public = {"exir_lowering.graphs", "exir_lowering.plugins", "exir_lowering.public_names"}
    assert set(contracts[1]["source_modules"]) == engine
    assert set(contracts[2]["forbidden_modules"]) == {f"exir_lowering.{name}" for name in layers} - public


def test_private_names_of_torch_and_executorch_are_below_and_where_speed_is() -> None:
    for path in FILES:
        if any(path.is_relative_to(PACKAGE / room) for room in ("_upstream", "fast")):
            continue
        for module, name in _imports(path):
            if module.split(".")[0] in ("torch", "executorch"):
                parts = [*module.split("."), name]
                assert not any(part.startswith("_") for part in parts), f"{path}: from {module} import {name}"
        for node in _nodes(path):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                own = own or ast.unparse(node).startswith("torch.ops.")  # an operator's name
                own = own or ast.unparse(node) in ("sys._current_frames", "os._exit", "torch._check")  # documented
                assert own, f"{path}:{node.lineno}: {ast.unparse(node)} is a private attribute of something else"


def test_what_catches_everything_lets_a_want_of_memory_through_first() -> None:
    """A MemoryError must not become somebody's failure, and move a partition to the host in silence."""
    for path in FILES:
        for node in (node for node in _nodes(path) if isinstance(node, ast.Try)):
            kinds = [ast.unparse(handler.type) for handler in node.handlers if handler.type is not None]
            if "Exception" in kinds:
                before = kinds[: kinds.index("Exception")]
                where = f"{path}:{node.lineno}: begin with `except MemoryError: raise`"
                assert any("MemoryError" in kind for kind in before), where


def test_no_assert_in_shipped_code() -> None:
    """What a user or a plug-in gets wrong is checked under `python -O` too."""
    assert not [f"{path}:{node.lineno}" for path in FILES for node in _nodes(path) if isinstance(node, ast.Assert)]


@pytest.mark.parametrize("path", sorted((PACKAGE / "testing").rglob("*.py")), ids=lambda path: path.stem)
def test_the_suite_for_plugins_imports_pytest_late(path: Path) -> None:
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not any("pytest" in ast.unparse(node) for node in top), path
