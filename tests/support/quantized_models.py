"""A convolutional model, quantised by ExecuTorch's XNNPACK recipes."""

from __future__ import annotations

import functools
import warnings

import torch
from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from executorch.exir.backend.partitioner import Partitioner
from torch.export import ExportedProgram, export
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

INPUTS = (torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16),)


class ConvNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.linear = torch.nn.Linear(8 * 14 * 14, 32)
        self.head = torch.nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv(x)).flatten(1)
        return self.head(torch.relu(self.linear(x)))


@functools.cache
def quantized(dynamic: bool) -> ExportedProgram:
    """Return the model, quantised; no lowering changes it, so all tests of a process have the same one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantize(ConvNet(), INPUTS, dynamic)


def quantize(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], dynamic: bool) -> ExportedProgram:
    torch.manual_seed(0)
    quantizer = XNNPACKQuantizer().set_global(
        get_symmetric_quantization_config(is_per_channel=True, is_dynamic=dynamic)
    )
    prepared = prepare_pt2e(export(model.eval(), inputs).module(), quantizer)
    prepared(*inputs)
    return export(convert_pt2e(prepared), inputs)


def partitioners(dynamic: bool) -> list[Partitioner]:
    if dynamic:
        return [
            XnnpackPartitioner(config_precisions=ConfigPrecisionType.DYNAMIC_QUANT, per_op_mode=True),
            XnnpackPartitioner(),
        ]
    return [XnnpackPartitioner()]
