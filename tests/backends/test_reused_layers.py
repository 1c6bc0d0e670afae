"""Random networks that call layers several times are computed by XNNPACK as by eager, in float and in int8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
from reused_layers import ReusedLayers
from torch.export import ExportedProgram, export
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from exir_lowering import load, lower


def _check(program: ExportedProgram, x: torch.Tensor, tolerance: float) -> None:
    expected = program.module()(x)
    for found, wanted in zip(load(lower(program, "xnnpack").emit().buffer).run("forward", x), expected, strict=True):
        assert float((found - wanted).abs().max()) <= tolerance * max(1e-3, float(wanted.abs().max()))


@pytest.mark.parametrize("seed", range(200))
def test_in_float(seed: int) -> None:
    network = ReusedLayers(seed).eval()
    _check(export(network, (network.example,)), network.example, 1e-3)


@pytest.mark.parametrize("how", [{"is_per_channel": False}, {"is_per_channel": True}, {"is_dynamic": True}], ids=str)
@pytest.mark.parametrize("seed", range(40))
def test_in_int8(seed: int, how: dict[str, Any]) -> None:
    network = ReusedLayers(seed, normalized=False).eval()  # torchao takes seconds where there are normalizations
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(**how))
    prepared = prepare_pt2e(export(network, (network.example,)).module(), quantizer)
    prepared(network.example)
    # A value on the border between two steps may be rounded to either, and the next layers multiply that.
    _check(export(convert_pt2e(prepared), (network.example,)), network.example, 0.08)
