"""What the code of vendors does wrong is an error that says who, where, and what to do: tried on the real ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_payloads import installed
from vendor_models import build
from vendor_shelf import programs_of

from exir_lowering import BackendContractError, BackendFailure, lower, plan

Patch = pytest.MonkeyPatch


def test_core_ml_with_state_for_an_old_system() -> None:
    """ExecuTorch's default partitioner takes state that needs iOS 18."""
    programs = programs_of(installed("coreml"), build("cached_attention"))
    with pytest.raises(BackendFailure) as raised:
        lower(programs, "coreml")
    text = str(raised.value)
    assert text.startswith("Backend 'CoreMLBackend' failed: ValueError: State model is supported only >= iOS18.")
    assert "coreml_preprocess.py" in text and re.search(r"partition forward/0:\w+ of method 'forward'", text)
    assert "vendor_models.py" in text and isinstance(raised.value.__cause__, ValueError)


def test_vela_that_is_missing(monkeypatch: Patch) -> None:
    """The partitioner is there without it."""
    vendor = installed("ethos-u")
    programs = programs_of(vendor, build("cnn"), "int8")
    monkeypatch.setattr("executorch.backends.arm.arm_vela.has_vela", False)
    with pytest.raises(BackendFailure) as raised:
        lower(programs, vendor.partitioner("int8"))
    text = str(raised.value)
    assert text.startswith("Backend 'EthosUBackend' failed: RuntimeError: ethos-u-vela")
    assert 'Install what the backend needs: pip install "exir-lowering[ethos-u]"' in text
    assert "of method 'forward'" in text


def test_a_check_of_vulkan_that_raises(monkeypatch: Patch) -> None:
    """The operator stays on the host, for that reason."""
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanSupportedOperators

    check = VulkanSupportedOperators.is_node_supported

    def fails(self: Any, submodules: Any, node: torch.fx.Node) -> bool:
        if "relu" in node.name:
            raise KeyError("no such limit")
        return bool(check(self, submodules, node))

    monkeypatch.setattr(VulkanSupportedOperators, "is_node_supported", fails)
    (method,) = plan(programs_of(installed("vulkan"), build("mlp")), "vulkan").methods
    (host,) = method.host
    assert host.operator == "aten.relu.default" and "raised KeyError: 'no such limit'" in host.reason
    assert len(method.partitions) == 2


def _fails(*given: Any) -> Any:
    assert not given, "the graph has no output"


def _returns_less(*given: Any) -> dict[str, list[Any]]:
    return {"forward": []}


@pytest.mark.parametrize(
    ("function", "replacement", "kind", "said"),
    [
        ("preprocess", _fails, BackendFailure, "failed: AssertionError: the graph has no output"),
        ("preprocess_multimethod", _returns_less, BackendContractError, "returned 0 results for method 'forward'"),
        ("preprocess", lambda *given: None, BackendContractError, "returned NoneType for partition forward/0:"),
    ],
)
def test_what_tosa_does_wrong(
    function: str, replacement: Callable[..., Any], kind: type[Exception], said: str, monkeypatch: Patch
) -> None:
    from executorch.backends.arm.tosa.backend import TOSABackend

    monkeypatch.setattr(TOSABackend, function, staticmethod(replacement))
    with pytest.raises(kind, match="Backend 'TOSABackend'") as raised:
        lower(programs_of(installed("tosa"), build("mlp")), "tosa")
    assert said in str(raised.value) and "forward/0:" in str(raised.value)


def test_vulkan_that_writes_into_a_weight(monkeypatch: Patch) -> None:
    from executorch.backends.vulkan.vulkan_preprocess import VulkanBackend

    def writes(program: torch.export.ExportedProgram, specs: Any) -> None:
        next(iter(program.state_dict.values())).data.add_(1)
        raise AssertionError

    monkeypatch.setattr(VulkanBackend, "preprocess", staticmethod(writes))
    with pytest.raises(BackendContractError, match=r"'VulkanBackend' wrote into forward:\S+weight during preprocess"):
        lower(programs_of(installed("vulkan"), build("mlp")), "vulkan")
