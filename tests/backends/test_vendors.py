"""Partitioners of other vendors by name: one whose compiler is in the wheel, and what is said of the others."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import pytest
import torch
from torch.export import ExportedProgram, export

from exir_lowering import PluginLoadError, UnknownPluginError, plan
from exir_lowering.plugins import registry


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()).eval()
    return export(model, (torch.ones(2, 8),))


def test_a_name_is_a_partitioner_of_executorch(program: ExportedProgram) -> None:
    level = logging.root.level
    (method,) = plan(program, "vulkan").methods
    assert [part.backend_id for part in method.partitions] == ["VulkanBackend"]
    assert logging.root.level == level


@pytest.mark.parametrize(
    ("name", "module", "install"),
    [
        ("ethos-u", "ethosu", 'pip install "executorch[ethos-u]"'),
        ("coreml", "coremltools", "pip install coremltools"),
    ],
)
def test_what_is_missing_is_said_with_how_to_install_it(
    program: ExportedProgram, name: str, module: str, install: str
) -> None:
    if find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    with pytest.raises(PluginLoadError) as raised:
        plan(program, name)
    assert str(raised.value).startswith(f"The partitioner {name!r} needs {module}, which is missing here: ")
    assert install in str(raised.value)
    (found,) = (one for one in registry.list_installed() if one.id == name)
    assert found.missing == module and install in found.error


def test_an_sdk_is_found_by_its_variable(program: ExportedProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QNN_SDK_ROOT", raising=False)
    with pytest.raises(PluginLoadError, match="set QNN_SDK_ROOT to its folder"):
        plan(program, "qnn")
    monkeypatch.setenv("QNN_SDK_ROOT", "/no/such/folder")
    assert type(registry.find_partitioner("qnn")).__name__ == "QnnPartitioner"
    with pytest.raises(UnknownPluginError, match=r"Did you mean 'ethos-u'\?"):
        plan(program, "ethosu")
