"""Programs whose files show what a release runs beyond single kernels: XNNPACK's operators, quantised kernels, state,
branches, loops and dynamic sizes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from quantized_models import quantize
from release_probes import Case
from torch import nn
from torch.export import Dim, export
from torch.nn import functional as F

from exir_lowering import LoweringError, lower


class Calls(nn.Module):
    """Calls a function with its inputs."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*self.layers, *inputs)


_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name) for name in ("abs", "ceil", "exp", "floor", "neg", "rsqrt", "sigmoid", "sqrt")},
    **{name: getattr(torch, name) for name in ("square", "tanh", "log", "sin", "cos", "relu", "clone")},
    **{name: getattr(F, name) for name in ("hardswish", "elu", "gelu", "leaky_relu", "relu6", "hardtanh", "silu")},
    "softmax": lambda x: F.softmax(x, -1),
    "mean": lambda x: x.mean((-1, -2), keepdim=True),
    "sum": lambda x: x.sum((-1, -2), keepdim=True),
    "pad": lambda x: F.pad(x, (1, 2)),
    "slice": lambda x: x[..., 1:],
    "permute": lambda x: x.transpose(-1, -2) + 1.0,
    "view": lambda x: x.reshape(-1) * 2.0,
    "unsqueeze": lambda x: x.unsqueeze(0) * 2.0,
    "clamp": lambda x: x.clamp(0.1, 0.7),
    "scalar": lambda x: x * 2.0 - 1.0,
}
_BINARY: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "minimum", "maximum")},
    "addrelu": lambda x, y: torch.relu(x + y),
    "cat2": lambda x, y: torch.cat([x, y], -1),
    "cat3": lambda x, y: torch.cat([x, y, x], -1),
    "cat4": lambda x, y: torch.cat([x, y, x, y], -1),
    "cat5": lambda x, y: torch.cat([x, y, x, y, y], -1),
    "prelu": lambda x, y: F.prelu(x, torch.tensor([0.2], dtype=x.dtype)),
}
_SHAPES = [(4,), (3, 4), (2, 3, 4), (2, 3, 4, 4), (1, 2, 3, 2, 4)]
_IMAGES: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(4, 8, 3),
    "conv plain": lambda: nn.Conv2d(4, 8, 3, bias=False),
    "conv relu": lambda: nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU()),
    "conv bn": lambda: nn.Sequential(nn.Conv2d(4, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU6()),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4),
    "depthwise plain": lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False),
    "pointwise plain": lambda: nn.Conv2d(4, 8, 1, bias=False),
    "transposed plain": lambda: nn.ConvTranspose2d(4, 8, 3, bias=False),
    "grouped": lambda: nn.Conv2d(4, 8, 3, groups=2),
    "pointwise": lambda: nn.Conv2d(4, 8, 1),
    "transposed": lambda: nn.ConvTranspose2d(4, 8, 3, stride=2),
    "max_pool": lambda: nn.MaxPool2d(2),
    "avg_pool": lambda: nn.AvgPool2d(2),
    "adaptive": lambda: nn.AdaptiveAvgPool2d(1),
    "upsample": lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
    "bn": lambda: nn.BatchNorm2d(4),
}
_LINEAR: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 6),
    "linear plain": lambda: nn.Linear(8, 6, bias=False),
    "linear relu": lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU()),
}


def _programs(dtype: torch.dtype) -> Iterator[tuple[str, nn.Module, tuple[torch.Tensor, ...]]]:
    def make(*shape: int) -> torch.Tensor:
        return (torch.rand(shape) * 0.8 + 0.1).to(dtype)

    for shape in _SHAPES:
        for name, function in _UNARY.items():
            if len(shape) > 1 or name not in ("mean", "sum", "permute"):
                yield name, Calls(function), (make(*shape),)
        for name, function in _BINARY.items():
            yield name, Calls(function), (make(*shape), make(*shape))
            for start in range(1, len(shape)) if "cat" not in name else ():
                yield name, Calls(function), (make(*shape), make(*shape[start:]))
                yield name, Calls(function), (make(*shape[start:]), make(*shape))
        if len(shape) > 1:
            for name, layer in _LINEAR.items():
                yield name, layer().to(dtype), (make(*shape[:-1], 8),)
    for name, layer in _IMAGES.items():
        yield name, layer().eval().to(dtype), (make(1, 4, 8, 8),)
        yield name, layer().eval().to(dtype), (make(1, 4, 8, 8).to(memory_format=torch.channels_last),)
        yield name, layer().eval().to(dtype), (make(2, 4, 8, 8),)
    yield "conv1d", nn.Conv1d(4, 8, 3).to(dtype), (make(1, 4, 8),)
    yield "bmm", Calls(torch.bmm), (make(2, 3, 4), make(2, 4, 5))
    yield "matmul", Calls(torch.matmul), (make(1, 2, 3, 4), make(1, 2, 4, 5))


class Counter(nn.Module):
    """Has state, which a call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.tensor([3.0, 4.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return self.total * 2


class Cache(nn.Module):
    """Has state of any type and shape, of which a call writes a part."""

    def __init__(self, start: torch.Tensor, write: Callable[..., object]) -> None:
        super().__init__()
        self.register_buffer("kept", start)
        self.write = write

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        self.write(self.kept, x, place)
        return self.kept.clone()


class Branches(nn.Module):
    """Takes one of two ways."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 1, lambda x: x * 2, lambda x: x - 1, (x,))


def _dynamic() -> Iterator[tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    x = torch.rand(6, 4)
    yield nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (x,)
    yield Calls(lambda x: torch.cat([x, x * 2]).reshape(x.shape[0], -1)), (x,)
    yield Calls(lambda x: x.reshape(-1, 2) * 2), (x,)
    yield Calls(lambda x: x.view(x.shape[0] * 2, 2).sum(-1).view(x.shape[0], 2)), (x,)
    yield Calls(lambda x: x.reshape(x.shape[0], 2, 2).permute(0, 2, 1).reshape(-1)), (x,)
    yield Calls(lambda x: x[1 : x.shape[0] - 1] + x.shape[0]), (x,)
    yield Calls(lambda x: torch.softmax(x @ x.t(), -1)), (x,)
    yield Calls(lambda x: torch.arange(x.shape[0]) + torch.ones(x.shape[0])), (x,)
    yield Calls(lambda x: x.unsqueeze(0).expand(3, -1, -1).sum(0) / (x.shape[0] // 2 + 1)), (x,)


def _write_slice(kept: torch.Tensor, x: torch.Tensor, place: torch.Tensor) -> None:
    kept[:1] = x


def _write_at(kept: torch.Tensor, x: torch.Tensor, place: torch.Tensor) -> None:
    kept[place] = x


def state_cases() -> Iterator[Case]:
    """Yield programs with state, as caches are."""
    for dtype in (torch.float32, torch.float16, torch.int64, torch.int32, torch.int8, torch.bool):
        for shape in ((3,), (3, 4), (3, 2, 4), (3, 2, 1, 4)):
            x, place = torch.ones(1, *shape[1:]).to(dtype), torch.tensor([1])
            for start in (torch.zeros(shape).to(dtype), torch.rand(shape).mul(9).to(dtype)):
                for write in (_write_slice, _write_at, lambda kept, x, place: kept.copy_(x.expand_as(kept))):
                    yield from _case(Cache(start.clone(), write), (x, place), None)


def _lowered(programs: Any, method: str, partitioners: Any, inputs: Any, expected: Any) -> Iterator[Case]:
    try:
        content = lower(programs, partitioners).emit().buffer
    except LoweringError:
        return
    yield content, method, [one.clone() for one in inputs], [one.clone() for one in expected]


def _case(module: nn.Module, inputs: Any, partitioners: Any, **options: Any) -> Iterator[Case]:
    try:
        program = export(module.eval(), inputs, **options)
        expected = copy.deepcopy(module)(*(one.clone() for one in inputs))  # state is to stay as it is
    except Exception:  # torch itself does not compute it in this type
        return
    results = [one.detach() for one in (expected if isinstance(expected, (tuple, list)) else [expected])]
    yield from _lowered(program, "forward", partitioners, inputs, results)


def _quantised() -> Iterator[Case]:
    names = ("conv", "conv relu", "conv bn", "depthwise", "transposed", "max_pool", "adaptive")
    models = [(_IMAGES[name](), (torch.rand(1, 4, 8, 8),)) for name in names]
    models += [(layer(), (torch.rand(3, 8),)) for layer in _LINEAR.values()]
    models += [(layer(), (torch.rand(1, 3, 8),)) for layer in _LINEAR.values()]
    for name in ("add", "mul", "cat2", "cat3", "addrelu"):
        models += [(Calls(_BINARY[name]), (torch.rand(2, 4, 4, 4), torch.rand(2, 4, 4, 4)))]
    for model, inputs in models:
        for dynamic in (False, True):
            try:
                program = quantize(model, inputs, dynamic)
            except Exception:  # the quantizer does not take it
                continue
            expected = [program.module()(*inputs).detach()]
            for partitioners in ("xnnpack", None):
                yield from _lowered(program, "forward", partitioners, inputs, expected)
    for change in (lambda x: x.flatten(1), lambda x: x.permute(0, 2, 3, 1), lambda x: x.reshape(1, 2, -1)):
        program = quantize(nn.Sequential(_IMAGES["conv relu"](), Calls(change)), (torch.rand(1, 4, 8, 8),), False)
        for partitioners in ("xnnpack", None):
            x = torch.rand(1, 4, 8, 8)
            yield from _lowered(program, "forward", partitioners, [x], [program.module()(x).detach()])
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_api import Int8DynamicActivationIntxWeightConfig, quantize_

    for shape in ((1, 64), (3, 64), (1, 3, 64)):
        for bias in (True, False):
            model = nn.Sequential(nn.Linear(64, 32, bias=bias)).eval()
            config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
            quantize_(model, config)
            yield from _case(model, (torch.rand(shape),), "xnnpack")


def dynamic_cases() -> Iterator[Case]:
    """Yield programs of dynamic sizes."""
    batch = {0: Dim("batch", min=3, max=9)}
    for module, inputs in _dynamic():
        for partitioners in (None, "xnnpack"):
            shapes: Any = ((batch,),) if isinstance(module, Calls) else (batch,)
            yield from _case(module, inputs, partitioners, dynamic_shapes=shapes)


def program_cases() -> Iterator[Case]:
    """Yield the cases."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16):
        for _, module, inputs in _programs(dtype):
            yield from _case(module, inputs, "xnnpack")
    yield from dynamic_cases()
    for module, inputs in ((Counter(), (torch.ones(2),)), (Branches(), (torch.ones(3),))):
        yield from _case(module, inputs, None)
    yield from _quantised()
    yield from state_cases()
