"""The backends' names in torch's registry: as entry points, or registered in a process that finds none."""

import tomllib
from pathlib import Path

import forked
import pytest
from folders import ROOT

from exir_lowering.dynamo import backend

ENTRY_POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"]

NO_ENTRY_POINTS = """
import importlib.metadata
real = importlib.metadata.entry_points
def without(**selected):
    found = real(**selected)
    if selected.get("group") == "torch_dynamo_backends":
        found = importlib.metadata.EntryPoints(each for each in found if not each.name.startswith("exir_lowering"))
    return found
importlib.metadata.entry_points = without
"""
"""What a source tree that is not installed finds, wherever the test runs."""

COMPILES = """
import torch
def f(x):
    return torch.sin(x) + 1
x = torch.randn(3)
compiled = torch.compile(f, backend="exir_lowering", options={"partitioners": "reference"})
torch.testing.assert_close(compiled(x), f(x))
from exir_lowering.dynamo import reports
assert [report.backend for report in reports()] == ["exir_lowering"], reports()
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds the entry points of this tree's pyproject.toml, and no others of ours."""
    info = tmp_path / "exir_lowering-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: exir-lowering\nVersion: 0.1.0\n")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in found.items())
        for group, found in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return {"PYTHONPATH": f"{tmp_path}:{ROOT}"}


def run(script: str, env: dict[str, str], *, fresh: bool = False) -> None:
    done = forked.run(script, env=env, fresh=fresh)
    assert done.returncode == 0, done.stderr[-3000:]


def test_torch_lists_the_entry_points_and_imports_nothing_of_ours(installed: dict[str, str]) -> None:
    script = """
import sys, torch
listed = torch._dynamo.list_backends()
assert "exir_lowering" in listed, listed
assert not [name for name in sys.modules if name.startswith(("exir_lowering", "executorch"))]
"""
    run(script, installed, fresh=True)


@pytest.mark.parametrize("first", ["exir_lowering.dynamo", "torch._dynamo"])
def test_importing_first_registers_nothing_twice(installed: dict[str, str], first: str) -> None:
    run(f"import {first}\n{COMPILES}", installed)


def test_importing_registers_where_no_entry_point_is_found() -> None:
    listed = "assert 'exir_lowering' in torch._dynamo.list_backends()\n"
    before = f"{NO_ENTRY_POINTS}\nimport torch\nassert 'exir_lowering' not in torch._dynamo.list_backends()\n"
    run(f"{before}import exir_lowering.dynamo\n{listed}{COMPILES}{listed}", {"PYTHONPATH": str(ROOT)})


def test_entry_points_and_registration_name_the_same_functions() -> None:
    assert {backend.__name__: f"{backend.__module__}:backend"} == ENTRY_POINTS
