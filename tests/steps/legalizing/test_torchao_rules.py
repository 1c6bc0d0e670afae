"""Weights and activations of few bits, by torchao: right in a file, wherever they are computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchao.quantization as quantization
from executorch.exir import ExecutorchBackendConfig
from torch.export import Dim, export
from torch.fx.experimental.proxy_tensor import make_fx
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.utils import unwrap_tensor_subclass

from exir_lowering import inspect, load, lower
from exir_lowering._upstream.legalizing import own_decomposition
from exir_lowering.steps.legalizing.fragments import RULES
from exir_lowering.steps.legalizing.plain import COMPUTED

AO: Any = torch.ops.torchao
HALVES = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS = [([1, 1, 8], (2, 3, 8)), ([1, 1, 4], (2, 3, 8)), ([2, 3, 8], (2, 3, 8)), ([1, 4], (1, 8)), ([4, 1], (4, 2))]
ODD = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 0.0, -0.0, 1e30, -1e30, 1e-40, 127.5, -128.5])


def numbers(sizes: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return numbers of which some lie between two integers, and some are very large or small."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(sizes, generator=generator) * 10 ** (seed % 3)
    odd = ODD[torch.randint(len(ODD), sizes, generator=generator)]
    return torch.where(torch.rand(sizes, generator=generator) < 0.3 * (seed % 2), odd, made).to(dtype)


def same(name: str, *args: Any, **kwargs: Any) -> Any:
    """Check that a decomposition, traced or not, gives the same bits as its operator; return what it gives."""
    operator = getattr(AO, name).default
    assert f"torchao.{name}.default" in COMPUTED
    rule: Any = own_decomposition(operator)
    expected, got = getattr(AO, name)(*args, **kwargs), rule(*args, **kwargs)
    traced: Any = make_fx(lambda first: rule(first, *args[1:], **kwargs))(args[0])(args[0])
    for one in (got, traced):
        torch.testing.assert_close(one, expected, rtol=0, atol=0, equal_nan=True)
    return got


@pytest.mark.parametrize("mapping", ["SYMMETRIC", "SYMMETRIC_NO_CLIPPING_ERR", "ASYMMETRIC"])
def test_decompositions_give_the_same_bits(mapping: str) -> None:
    ranges = [(torch.int8, None, None), (torch.int8, -8, 7), (torch.uint8, 0, 255)]
    for number, ((block, sizes), dtype, (kind, low, high)) in enumerate(itertools.product(BLOCKS, HALVES, ranges)):
        if number % 2:
            continue
        if mapping == "SYMMETRIC_NO_CLIPPING_ERR" and low == 0:
            continue  # it divides by the least integer
        x = numbers(sizes, dtype, number)
        more = {"scale_dtype": torch.float32, "zero_point_dtype": torch.int8 if kind is torch.int8 else torch.uint8}
        same("choose_qparams_affine", x, mapping, block, kind, low, high, eps=1e-5)
        same("choose_qparams_affine", x, mapping, block, kind, low, high, keepdim=True)
        scale, zero_point = same("choose_qparams_affine", x, mapping, block, kind, low, high, **more)
        whole = same("quantize_affine", x, block, scale, zero_point, kind, low, high)
        other = HALVES[number % 3]
        same("dequantize_affine", whole, block, scale, zero_point, kind, low, high, output_dtype=other)
        same("dequantize_affine", whole, block, scale.to(dtype), None, kind, low, high, output_dtype=dtype)


def test_a_product_of_integers_is_exact() -> None:
    one, two = (torch.randint(-128, 128, sizes, dtype=torch.int8) for sizes in ((40, 1500), (1500, 16)))
    assert torch.equal(RULES["aten._int_mm.default"](one, two), torch._int_mm(one, two))


class Words(torch.nn.Module):
    """A table, layers with and without a bias, and an adapter of low rank beside one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = torch.nn.Embedding(50, 64), torch.nn.Linear(96, 64, bias=False)
        self.layer = torch.nn.Linear(64, 96)
        self.down, self.up = torch.nn.Linear(64, 4, bias=False), torch.nn.Linear(4, 96, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        y: torch.Tensor = self.out(torch.relu(self.layer(x) + self.up(self.down(x))))
        return y


def layers(module: torch.nn.Module, _: str) -> bool:
    return isinstance(module, torch.nn.Linear) and min(module.weight.shape) > 4


def tables(module: torch.nn.Module, _: str) -> bool:
    return isinstance(module, torch.nn.Embedding)


DYNAMIC, WEIGHTS = quantization.Int8DynamicActivationIntxWeightConfig, quantization.IntxWeightOnlyConfig
FORMS: dict[str, list[tuple[Callable[[], Any], Any]]] = {
    "8da4w": [(lambda: DYNAMIC(torch.int4, PerGroup(32)), layers)],
    "8da8w": [(lambda: DYNAMIC(torch.int8, PerAxis(0)), layers)],
    "weights of 4 bits": [(lambda: WEIGHTS(torch.int4, PerGroup(32)), layers)],
    "weights of 8 bits": [(lambda: WEIGHTS(torch.int8, PerAxis(0)), layers)],
    "weights of 8 bits, as a product": [(lambda: quantization.Int8WeightOnlyConfig(), layers)],
    "table of 2 bits": [(lambda: WEIGHTS(torch.int2, PerGroup(32)), tables)],
    "table of 4 bits": [(lambda: WEIGHTS(torch.int4, PerGroup(16)), tables)],
    "table of 8 bits": [(lambda: WEIGHTS(torch.int8, PerAxis(0)), tables)],
    "both": [
        (lambda: DYNAMIC(torch.int4, PerGroup(32)), layers),
        (lambda: WEIGHTS(torch.int4, PerGroup(32)), tables),
    ],
}
FUSING = ExecutorchBackendConfig(do_quant_fusion_and_const_prop=True)


@pytest.mark.parametrize("partitioner", [None, "xnnpack"], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_right_wherever_it_is_computed(form: str, partitioner: str | None) -> None:
    """XNNPACK has no layers of such weights with activations in float: what it took, it computed without the scales."""
    torch.manual_seed(0)
    model = Words().eval()
    for make, which in FORMS[form]:
        quantization.quantize_(model, make(), filter_fn=which)
    if form in ("8da4w", "table of 4 bits"):  # as people did before torch.export took tensors of torchao
        unwrap_tensor_subclass(model)
    words = Dim("words", min=1, max=20)
    program = export(model, (torch.arange(6)[None],), dynamic_shapes=({1: words},))
    lowered = lower(program, partitioner)
    tolerance = 0.02 if partitioner and form in ("8da4w", "both") else 1e-5  # XNNPACK's scales have 8 bits
    for config in (None, FUSING) if form.startswith("table") else (None,):
        file = load(lowered.emit(config).buffer)
        for count in (6, 1, 20):
            tokens = torch.randint(50, (1, count))
            (got,) = file.run("forward", tokens)
            torch.testing.assert_close(got, model(tokens), rtol=0, atol=tolerance)
    if partitioner and form in ("8da4w", "8da8w", "both"):
        host = {node.operator for node in lowered.report.methods[0].host}
        assert not any("mm" in name or "linear" in name for name in host)


def test_weights_stay_small() -> None:
    model = Words().eval()
    whole = len(lower(export(model, (torch.arange(6)[None],))).emit().buffer)
    for make, which in (*FORMS["weights of 8 bits"], *FORMS["table of 8 bits"]):
        quantization.quantize_(model, make(), filter_fn=which)
    artifact = lower(export(model, (torch.arange(6)[None],))).emit()
    assert len(artifact.buffer) < whole / 2 and inspect(artifact.buffer)


@pytest.mark.parametrize("form", ["weights of 8 bits", "8da4w", "table of 4 bits"])
def test_in_branches(form: str) -> None:
    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = Words()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            doubled: torch.Tensor = torch.cond(
                tokens.sum() > 9, lambda t: self.words(t) * 2, lambda t: self.words(t) - 1, (tokens,)
            )
            return doubled + self.words(tokens)

    model = Branches().eval()
    for make, which in FORMS[form]:
        quantization.quantize_(model, make(), filter_fn=which)
    unwrap_tensor_subclass(model)
    program = export(model, (torch.arange(4)[None],))
    file = load(lower(program).emit().buffer)
    for tokens in (torch.tensor([[1, 2, 3, 0]]), torch.tensor([[9, 2, 3, 40]])):
        torch.testing.assert_close(file.run("forward", tokens)[0], model(tokens), rtol=0, atol=1e-5)
