"""The seven kinds of files that are fuzzed, as small as they come."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from executorch.exir import ExecutorchBackendConfig
from fuzzing import Kind, Sample, run_debugged, run_module, run_program
from lowering_support import TagPartitioner, by_operator
from quantized_models import INPUTS as QUANTIZED_INPUTS, quantized
from torch import nn
from torch.export import Dim, export

from exir_lowering import Backend, BackendUnavailableWarning, LoweredMethods, PreprocessResult, lower
from exir_lowering._upstream.runtime import executorch_runtime


class Operators(nn.Module):
    """Kernels of many kinds: on floats, integers and bools, with lists, and with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear, self.norm = nn.Embedding(7, 6), nn.Linear(6, 4), nn.LayerNorm(4)
        self.conv = nn.Conv1d(3, 2, 2)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> Any:
        y = self.norm(self.linear(self.table(index + 1)))
        left, right = y.split(2, dim=-1)
        y = torch.cat([left.clamp(-1, 1), right.softmax(-1)], dim=-1)
        z = self.conv(y).mean(-1, keepdim=True).expand(-1, -1, 4)
        top, where = z.topk(2)
        picked = x[index % 2, :, None]
        return torch.where(x > 0, x, x.sum()), top.transpose(1, 2), where, picked.pow(2).amax(), x.to(torch.int32)


class Steps(nn.Module):
    """State, shapes of any size, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.arange(3.0))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        self.total.add_(x.sum(0))
        y = torch.cond(x.sum() > 0, lambda v: self.linear(v) + 1, lambda v: v * 3, (x,))
        return (x * y).reshape(-1) * 2, torch.cumsum(y, 0) + self.total


class Loop(nn.Module):
    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        from functorch.experimental.control_flow import map

        return map(lambda x, y: x * y + 1, xs, xs[0].clone())


class Net(nn.Module):
    """What convolutional networks are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.deep = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, groups=4, stride=2)
        self.up, self.pool, self.act = nn.ConvTranspose2d(4, 2, 2, stride=2), nn.MaxPool2d(2), nn.PReLU(2)
        self.linear, self.norm = nn.Linear(8, 5), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pool(self.act(self.up(torch.relu(self.norm(self.deep(self.conv(x)))))))
        y = torch.cat([y.mean((2, 3)), nn.functional.pad(y, (0, 1)).flatten(1)[:, :6]], 1)
        return torch.softmax(self.linear(y), -1)


class Attention(nn.Module):
    """What transformers are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.first(x).reshape(2, 4, 3, 8).unbind(2)
        y = torch.softmax(q @ k.transpose(1, 2) / 8, -1) @ v
        return nn.functional.gelu(self.second(y)) + torch.tanh(x) * torch.sigmoid(y) - x.abs().sqrt().clamp(0, 2)


class Away(Backend):
    """A backend that no machine has."""

    backend_id = "away"

    def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
        return PreprocessResult(b"away")


X, INDEX, IMAGE = torch.linspace(-1, 1, 6).reshape(2, 3), torch.tensor([[0, 1, 5]]), torch.linspace(-1, 1, 192)
IMAGE, WORDS, ROWS = IMAGE.reshape(1, 3, 8, 8), torch.linspace(-1, 1, 64).reshape(2, 4, 8), torch.ones(2, 3)


def _programs(module: nn.Module, inputs: tuple[Any, ...], partitioner: Any = None, **options: Any) -> LoweredMethods:
    torch.manual_seed(0)
    given = {key: options.pop(key) for key in ("backends",) if key in options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lower(export(module.eval(), inputs, **options), partitioner, **given)


def _operators(partitioner: Any = None) -> LoweredMethods:
    torch.manual_seed(0)
    return _programs(Operators(), (X, INDEX), partitioner)


def _sample(artifact: Any, inputs: Sequence[Any], **options: Any) -> Sample:
    """Save an artifact, and take its files without the debug information."""
    with tempfile.TemporaryDirectory() as folder:
        path = artifact.save(Path(folder) / "model.pte")
        files = {file.suffix: file.read_bytes() for file in path.parent.iterdir() if file.suffix != ".json"}
    return Sample(files, {"forward": inputs}, **options)


def kernels() -> list[Sample]:
    emitted = _operators().emit()
    return [Sample({".pte": emitted.buffer}, {"forward": (X, INDEX)}), _sample(emitted, (X, INDEX))]


def xnnpack() -> list[Sample]:
    samples = []
    batch = {"x": {0: Dim("batch", min=1, max=4)}}
    for make, inputs, options in (
        (Net, (IMAGE,), {}),
        (Attention, (WORDS,), {}),
        (Net, (IMAGE.repeat(2, 1, 1, 1),), {"dynamic_shapes": batch}),
    ):
        torch.manual_seed(0)
        found = _programs(make(), inputs, "xnnpack", **options)
        samples.append(Sample({".pte": found.emit().buffer}, {"forward": inputs}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dynamic in (False, True):
            found = lower(quantized(dynamic), "xnnpack")
            samples.append(Sample({".pte": found.emit().buffer}, {"forward": QUANTIZED_INPUTS}))
    return samples


def reference() -> list[Sample]:
    return [
        Sample({".pte": _operators("reference").emit().buffer}, {"forward": (X, INDEX)}),
        Sample({".pte": _programs(Steps(), (ROWS,), "reference").emit().buffer}, {"forward": (ROWS,)}),
    ]


def external() -> list[Sample]:
    samples = [_sample(_operators().emit(ExecutorchBackendConfig(external_constants=True)), (X, INDEX))]
    torch.manual_seed(0)
    net = _programs(Net(), (IMAGE,), "xnnpack").emit(ExecutorchBackendConfig(external_constants=True))
    return [*samples, _sample(net, (IMAGE,))]


def saved() -> list[Sample]:
    samples = []
    for found, inputs in (
        (_operators("xnnpack"), (X, INDEX)),
        (_programs(Steps(), (ROWS,)), (ROWS,)),
    ):
        module = found.module()
        module.scale, module.names = torch.ones(2), ["a", {"b": 1.5}]
        with tempfile.TemporaryDirectory() as folder:
            content = module.save(Path(folder) / "model.pte").read_bytes()
        samples.append(Sample({".pte": content}, {"forward": inputs}))
    return samples


def debugged() -> list[Sample]:
    samples = []
    for partitioner in (None, "reference"):
        artifact = _operators(partitioner).emit()
        with tempfile.TemporaryDirectory() as folder:
            path = artifact.save(Path(folder) / "model.pte")
            files = {".pte": path.read_bytes(), ".debug.json": path.with_suffix(".debug.json").read_bytes()}
        samples.append(Sample(files, {"forward": (X, INDEX)}))
    return samples


def steps() -> list[Sample]:
    rows = {"x": {0: Dim("rows", min=1, max=6)}}
    dynamic = _programs(Steps(), (ROWS,), dynamic_shapes=rows).emit()
    loop = _programs(Loop(), (ROWS,)).emit()
    tagged = TagPartitioner(by_operator("aten.mul.Tensor", "aten.add.Tensor", "aten.linear.default"), "away")
    kept = _programs(Steps(), (ROWS,), tagged, backends={"away": Away}).emit(keep_originals=True)
    return [
        Sample({".pte": dynamic.buffer}, {"forward": (ROWS,)}),
        Sample({".pte": loop.buffer}, {"forward": (ROWS,)}),
        Sample({".pte": kept.buffer}, {"forward": (ROWS,)}, unavailable="fallback"),
    ]


_KINDS: Mapping[str, tuple[Callable[[], list[Sample]], Any, Sequence[str]]] = {
    "kernels": (kernels, run_program, (".pte",)),
    "xnnpack": (xnnpack, run_program, (".pte",)),
    "reference": (reference, run_program, (".pte",)),
    "external": (external, run_program, (".pte", ".ptd")),
    "saved": (saved, run_module, (".pte",)),
    "debugged": (debugged, run_debugged, (".debug.json",)),
    "steps": (steps, run_program, (".pte",)),
}
KINDS = tuple(_KINDS)


def kind(name: str) -> Kind:
    """Make the files of a kind."""
    make, run, damaged = _KINDS[name]
    executorch_runtime()  # here, and not once more in each child
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BackendUnavailableWarning)
        return Kind(name, make(), damaged, run)
