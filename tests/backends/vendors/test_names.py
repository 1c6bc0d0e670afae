"""Vendors by name: what works here, and what is said of a compiler that is missing or broken."""

from __future__ import annotations

import json
import logging

import forked
import pytest
import torch
from test_openvino import HIDDEN
from torch.export import ExportedProgram, export

from exir_lowering import PluginLoadError, UnknownPluginError, plan
from exir_lowering.plugins import registry

MISSING = """
import io, json, sys
from contextlib import redirect_stdout
import torch
from exir_lowering import LoweringError, cli, plan

program = torch.export.export(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()), (torch.ones(2, 8),))
said = {}
for name in ("coreml", "ethos-u", "tosa"):
    try:
        plan(program, name)
    except LoweringError as error:
        said[name] = f"{type(error).__name__}: {error}"
doctor = io.StringIO()
with redirect_stdout(doctor):
    code = cli.main(["doctor"])
print(json.dumps([said, code, " ".join(doctor.getvalue().split())]))
"""

EXTRAS = {"coreml": "coreml", "ethos-u": "ethos-u", "tosa": "ethos-u"}


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()).eval()
    return export(model, (torch.ones(2, 8),))


def test_a_name_is_a_partitioner_of_executorch(program: ExportedProgram) -> None:
    level = logging.root.level
    (method,) = plan(program, "vulkan").methods
    assert [part.backend_id for part in method.partitions] == ["VulkanBackend"]
    assert logging.root.level == level


def test_what_is_missing_is_said_with_how_to_install_it() -> None:
    """By `plan` and by `exir-lower doctor`, which finds the others well."""
    hidden = {"coremltools", "ethosu", "tosa_serializer"}
    done = forked.run(f"HIDDEN = {hidden!r}\n{HIDDEN}\n{MISSING}")
    assert done.returncode == 0, done.stderr[-2000:]
    said, code, doctor = json.loads(done.stdout.strip().splitlines()[-1])
    for name, extra in EXTRAS.items():
        needed = "coremltools" if name == "coreml" else "tosa_serializer"
        text = f'The partitioner {name!r} needs {needed}, which is missing here: pip install "exir-lowering[{extra}]".'
        assert said[name] == f"PluginLoadError: {text}"
        assert text in doctor
    (works,) = (one for one in doctor.split(". ") if "Partitioners that work here" in one)
    assert code == 0 and "vulkan, xnnpack" in works and "coreml" not in works


def test_a_compiler_that_cannot_be_imported_is_said_with_how_to_install_it() -> None:
    """Core ML's package is found, and what it imports is not."""
    script = """
from exir_lowering import cli
assert cli.main(["doctor"]) == 1
"""
    done = forked.run(f"HIDDEN = {{'cattrs'}}\n{HIDDEN}\n{script}")
    assert done.returncode == 0, done.stderr[-2000:]
    said = " ".join(done.stdout.split())
    assert "The partitioner 'coreml' is broken: " in said and 'pip install "exir-lowering[coreml]"' in said


def test_an_sdk_is_found_by_its_variable(program: ExportedProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QNN_SDK_ROOT", raising=False)
    with pytest.raises(PluginLoadError, match="set QNN_SDK_ROOT to its folder"):
        plan(program, "qnn")
    monkeypatch.setenv("QNN_SDK_ROOT", "/no/such/folder")
    assert type(registry.find_partitioner("qnn")).__name__ == "QnnPartitioner"
    with pytest.raises(UnknownPluginError, match=r"Did you mean 'ethos-u'"):
        plan(program, "ethosu")
