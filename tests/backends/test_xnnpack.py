"""XNNPACK behind one word: float and int8 programs, and what the options change in the payloads."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from lowering_support import delegates, without_address
from quantized_models import INPUTS, ConvNet, quantized
from torch.export import ExportedProgram, export

import exir_lowering
from exir_lowering import LoweredMethods, Partitioner, graphs
from exir_lowering.backends.xnnpack.partitioner import xnnpack

Programs = Callable[[str], ExportedProgram]


@pytest.fixture(scope="module")
def program() -> Programs:
    """Return the same network as a float, a statically or a dynamically quantised program."""
    made: dict[str, ExportedProgram] = {}

    def make(kind: str) -> ExportedProgram:
        if kind not in made:
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made[kind] = export(ConvNet().eval(), INPUTS) if kind == "fp32" else quantized(kind == "dynamic_quant")
        return made[kind]

    return make


def lower(program: ExportedProgram, partitioners: Any) -> LoweredMethods:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exir_lowering.lower(program, partitioners)


def payloads(lowered: LoweredMethods) -> list[bytes]:
    return [bytes(delegate.processed_bytes) for delegate in delegates(lowered["forward"])]


def operators_on_host(lowered: LoweredMethods) -> set[str]:
    return {node.operator.removeprefix("aten.").partition(".")[0] for node in lowered.report.methods[0].host}


def check_run(lowered: LoweredMethods, program: ExportedProgram, tolerance: float) -> None:
    (got,) = exir_lowering.load(lowered.emit().buffer).run("forward", *INPUTS)
    torch.testing.assert_close(got, program.module()(*INPUTS), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ["fp32", "static_quant", "dynamic_quant"])
def test_one_word(kind: str, program: Programs) -> None:
    """Everything is delegated, with the bytes of ExecuTorch's own partitioner, and the numbers are eager's."""
    lowered = lower(program(kind), "xnnpack")
    assert payloads(lowered) == payloads(lower(program(kind), XnnpackPartitioner()))
    assert len(payloads(lowered)) == 1 and not operators_on_host(lowered)
    check_run(lowered, program(kind), 1e-5 if kind == "fp32" else 0.02)


def test_per_op_mode(program: Programs) -> None:
    """The convolution and both linear layers, with the activations that they take in, and the view."""
    lowered = lower(program("fp32"), xnnpack(per_op_mode=True))
    assert len(payloads(lowered)) == 4
    check_run(lowered, program("fp32"), 1e-5)


def test_precisions(program: Programs) -> None:
    """What does not exist in a precision that is asked for stays on the host."""
    dynamic = program("dynamic_quant")
    lowered = lower(dynamic, xnnpack(precisions="dynamic_quant", per_op_mode=True))
    assert len(payloads(lowered)) == 3 and operators_on_host(lowered) == {"relu", "view_copy"}
    check_run(lowered, dynamic, 0.02)
    both = lower(dynamic, [xnnpack(precisions="dynamic_quant", per_op_mode=True), xnnpack()])
    assert not operators_on_host(both)
    check_run(both, dynamic, 0.02)


def test_operators(program: Programs) -> None:
    lowered = lower(program("fp32"), xnnpack(operators=["aten.linear", "aten.relu.default"]))
    assert operators_on_host(lowered) == {"convolution", "view_copy"}
    check_run(lowered, program("fp32"), 1e-5)


def test_weights_that_are_handed_in(program: Programs) -> None:
    """The weights of linear layers leave the payload's data and become inputs of the delegate call."""
    inside, outside = (
        lower(program("fp32"), xnnpack(force_non_static_weights_for_f32_linear=forced)) for forced in (False, True)
    )

    def owned(lowered: LoweredMethods) -> int:
        stores = (delegate.named_data_store_output for delegate in delegates(lowered["forward"]))
        return sum(len(buffer) for store in stores if store is not None for buffer in store.buffers)

    linear = 4 * (8 * 14 * 14 * 32 + 32 * 5)
    assert linear <= owned(inside) - owned(outside) <= linear + 1024
    check_run(outside, program("fp32"), 1e-5)


def test_bf16() -> None:
    """Linear layers of bfloat16 are delegated when asked for only."""
    module = torch.nn.Linear(8, 8).to(torch.bfloat16)
    exported = export(module, (torch.ones(2, 8, dtype=torch.bfloat16),))
    assert not payloads(lower(exported, xnnpack()))
    assert payloads(lower(exported, xnnpack(enable_bf16=True)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precisions": "int8"}, ("'int8'", "fp32, static_quant, dynamic_quant")),
        ({"precisions": []}, ("[]", "fp32")),
        ({"precisions": 8}, ("8", "fp32")),
        ({"operators": "aten.linear"}, ("'aten.linear'", "a list")),
        ({"operators": []}, ("[]", "a list")),
        ({"operators": ["aten.liner"]}, ("'aten.liner'", "linear")),
        ({"operators": [torch.relu]}, ("relu", "namespace")),
        ({"operators": ["foo.linear"]}, ("'foo.linear'", "Did you mean 'aten.linear'?")),
        ({"operators": ["linear"]}, ("'linear'", "Did you mean 'aten.linear'?")),
        ({"operators": ["aten.conv2d"]}, ("'aten.conv2d'", "Did you mean", "'aten.convolution'")),
        ({"operators": ["aten.add.Scalar"]}, ("'aten.add.Scalar'", "Did you mean 'aten.add'")),
        ({"operators": ["aten.quantize_per_tensor"]}, ("Did you mean 'quantized_decomposed.quantize_per_tensor'",)),
        ({"operators": ["aten.softmax"]}, ("Did you mean 'aten._softmax'",)),
        ({"per_op_mode": "no"}, ("per_op_mode='no'", "True or False")),
        ({"enable_bf16": None}, ("enable_bf16=None", "True or False")),
        ({"force_non_static_weights_for_f32_linear": 1}, ("force_non_static_weights_for_f32_linear=1", "True or")),
    ],
    ids=without_address,
)
def test_options_of_the_wrong_kind(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(exir_lowering.InputError) as caught:
        xnnpack(**options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_it_is_executorchs_partitioner() -> None:
    assert isinstance(xnnpack(), XnnpackPartitioner) and isinstance(xnnpack(), Partitioner)


class Expectation(torch.nn.Module):
    """The expected value of a distribution, as detection transformers compute the edges of a box."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.randn(33))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(torch.softmax(x.reshape(-1, 33), -1), self.steps).reshape(-1, 4) + 1


@pytest.mark.parametrize("fast", [True, False])
def test_a_linear_layer_whose_weight_is_a_vector(fast: bool) -> None:
    model, calls = Expectation(), [torch.randn(1, rows, 132) for rows in (10, 3)]
    program = torch.export.export(model, (calls[0],), dynamic_shapes=({1: torch.export.Dim("rows", max=32)},))
    options = exir_lowering.LoweringOptions(fast=fast)
    loaded = exir_lowering.load(exir_lowering.lower(program, XnnpackPartitioner(), options=options).emit().buffer)
    for call in calls:
        (got,) = loaded.run("forward", call)
        torch.testing.assert_close(got, model(call))


class Around(torch.nn.Module):
    """An operator on which ExecuTorch's preprocess fails, between others that depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.prelu = torch.nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        return self.prelu(y - 0.5) + y


def test_what_it_is_known_to_fail_on_is_cut_out_but_not_for_another_backend_of_that_id() -> None:
    model, x, taken = Around().eval(), torch.randn(2, 3), []

    class Fixed(BackendDetails):
        @staticmethod
        def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
            taken.extend(graphs.operator_name(node) for node in edge_program.graph.nodes)
            return PreprocessResult(b"")

    program = torch.export.export(model, (x,))
    whole = exir_lowering.LoweringOptions(non_convex="raise")
    lowered = exir_lowering.lower(program, XnnpackPartitioner(), options=whole)
    assert {one.operator for one in lowered.report.methods[0].host} == {"aten.gt.Scalar", "aten.where.self"}
    (got,) = exir_lowering.load(lowered.emit().buffer).run("forward", x)
    torch.testing.assert_close(got, model(x))
    exir_lowering.lower(program, XnnpackPartitioner(), backends={"XnnpackBackend": Fixed})
    assert "aten.prelu.default" in taken
