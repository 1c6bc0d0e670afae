"""Several vendors in one lowering: one takes what the other leaves, and a variant that this machine has runs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from executorch.exir import ExecutorchBackendConfig
from lowering_support import delegates
from test_payloads import installed
from torch.export import Dim, export
from vendor_models import build
from vendor_shelf import programs_of

import exir_lowering
from exir_lowering import LoweredMethods, Partitioner
from exir_lowering.plugins import registry


def backends(lowered: LoweredMethods) -> Mapping[str, list[str]]:
    """Return the backends of each method's partitions; what stays on the host has a reason and a line."""
    for method in lowered.report.methods:
        assert all(node.reason and node.by for node in method.host)
    return {name: [one.backend_id for one in delegates(program)] for name, program in lowered.items()}


class Steps(torch.nn.Module):
    """Vulkan and Core ML take the layers, neither the error function nor what is left out for them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(torch.erfinv(self.first(x).sigmoid() * 0.9)))


def test_core_ml_before_xnnpack() -> None:
    """XNNPACK takes what Core ML is told to leave; the variant for CPUs of that file runs here."""
    installed("coreml")
    from executorch.backends.apple.coreml.partition import CoreMLPartitioner

    model, inputs = Steps().eval().requires_grad_(False), (torch.randn(2, 16),)
    program = export(model, inputs)
    phone: list[Partitioner | str] = [
        CoreMLPartitioner(skip_ops_for_coreml_delegation=["aten.tanh.default"]),
        "xnnpack",
    ]
    lowered = exir_lowering.lower(program, variants={"phone": phone, "cpu": "xnnpack"})
    found = backends(lowered)
    assert found["forward@phone"][0] == "CoreMLBackend" and found["forward@phone"][-1] == "XnnpackBackend"
    assert set(found["forward@cpu"]) == {"XnnpackBackend"}
    program_here = exir_lowering.load(lowered.emit().buffer)
    assert "forward@cpu" in str(program_here.choose("forward", *inputs))
    torch.testing.assert_close(program_here(*inputs)[0], model(*inputs), atol=1e-5, rtol=1e-5)


def test_vulkan_before_xnnpack_with_a_cache_in_two_methods() -> None:
    """Weights and the cache are in the file once, for both methods; the variant for CPUs generates eager's tokens."""
    methods = build("llama")
    programs = programs_of(installed("vulkan"), methods)
    lowered = exir_lowering.lower(programs, variants={"gpu": ["vulkan", "xnnpack"], "cpu": "xnnpack"})
    found = backends(lowered)
    assert all("VulkanBackend" in found[f"{name}@gpu"] for name in methods)
    assert {one for name in methods for one in found[f"{name}@cpu"]} == {"XnnpackBackend"}
    buffer = lowered.emit().buffer
    one = exir_lowering.lower({"decode": programs["decode"]}, ["vulkan", "xnnpack"]).emit().buffer
    weights = sum(weight.nbytes for weight in programs["decode"].state_dict.values())
    assert len(buffer) - len(one) < 2.2 * weights, "as Vulkan and as XNNPACK pack them, and not for each method"
    program = exir_lowering.load(buffer)
    for name, (model, inputs) in methods.items():
        torch.testing.assert_close(program.run(name, *inputs)[0], model(*inputs), atol=1e-4, rtol=1e-4)


def test_vulkan_before_xnnpack_with_any_batch() -> None:
    model, inputs = Steps().eval().requires_grad_(False), (torch.randn(2, 16),)
    program = export(model, inputs, dynamic_shapes=({0: Dim("batch", max=8)},))
    lowered = exir_lowering.lower(program, variants={"gpu": ["vulkan", "xnnpack"], "cpu": "xnnpack"})
    assert "VulkanBackend" in backends(lowered)["forward@gpu"]
    program_here = exir_lowering.load(lowered.emit().buffer)
    for size in (1, 8):
        x = torch.randn(size, 16)
        torch.testing.assert_close(program_here(x)[0], model(x), atol=1e-5, rtol=1e-5)


def test_ethos_u_before_the_kernels_of_cortex_m() -> None:
    """Cortex-M has no partitioner: its pass replaces what quantises on the host as the file is written."""
    from executorch.backends.cortex_m.passes import ReplaceQuantNodesPass

    vendor = installed("ethos-u")
    programs = programs_of(vendor, build("cnn"), "int8")
    lowered = exir_lowering.lower(programs, registry.find_partitioner("ethos-u"))
    assert backends(lowered) == {"forward": ["EthosUBackend"]}
    plain = lowered.emit().buffer
    buffer = lowered.emit(ExecutorchBackendConfig(passes=[ReplaceQuantNodesPass()])).buffer
    kernels = [sorted(exir_lowering.inspect(one).methods[0].kernels) for one in (plain, buffer)]
    assert all("quantized_decomposed::" in name for name in kernels[0])
    assert [name.split(".")[0] for name in kernels[1]] == [
        "cortex_m::dequantize_per_tensor",
        "cortex_m::quantize_per_tensor",
    ]


@pytest.mark.parametrize("second", ["xnnpack", None])
def test_ethos_u_before_xnnpack(second: str | None) -> None:
    """What is not in int8 is XNNPACK's, if it is there."""
    vendor = installed("ethos-u")
    programs = programs_of(vendor, build("cached_attention"), "int8")
    first = registry.find_partitioner("ethos-u")
    lowered = exir_lowering.lower(programs, [first, *([second] if second else [])])
    (found,) = backends(lowered).values()
    assert "EthosUBackend" in found and ("XnnpackBackend" in found) == (second is not None)
    exir_lowering.inspect(lowered.emit().buffer)
