"""Nothing but speed: with `fast` off, all bytes of all files are the same; test_lean: nothing of it is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import models
import pytest
import quantized_models
import random_flow
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export
from torch.nn import functional

from exir_lowering import LoweringOptions, lower

Programs = Mapping[str, ExportedProgram]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv, self.norm = nn.Linear(8, 16), nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        joined = torch.cat([y, y + 1, y * 2, y - 1, y * 3, y + 2, y * y], 1)
        return torch.softmax(torch.relu(self.linear(x)), -1), self.norm(self.conv(y)).relu(), joined


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Enlarged(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.interpolate(x, scale_factor=2, mode="bilinear") * 2


class Numbers(nn.Module):
    """Mixed types, numbers beside tensors, writes into intermediate values, and calls that record no gradients."""

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            y = (x + 0.1).clamp_(-1, 1).mul_(n)
        values, places = torch.topk(y, 2)
        return values // 3, places + n.sum(), torch.where(y > 0, y, 1e-3), y.to(torch.float16).view(-1), n % 3


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("kept", torch.zeros(2, 6, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


class Step(nn.Module):
    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.cache = cache

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.cache.kept.index_copy_(1, at, self.cache.linear(x)[:, None])
        self.cache.count += 1
        return self.cache.kept.sum(1) * self.cache.count


class Reset(Step):
    def forward(self) -> torch.Tensor:
        self.cache.kept.zero_()
        self.cache.count.copy_(torch.tensor(0))
        return self.cache.kept + 1


def layers(dynamic: bool) -> Programs:
    torch.manual_seed(0)
    shapes = ({0: Dim("batch", min=2, max=32)},) * 2 if dynamic else None
    return {"forward": export(Layers().eval(), (torch.randn(4, 8), torch.randn(4, 4, 9)), dynamic_shapes=shapes)}


def cache() -> Programs:
    torch.manual_seed(0)
    held = Cache()
    return {"step": export(Step(held), (torch.ones(2, 4), torch.tensor([3]))), "reset": export(Reset(held), ())}


def model(name: str) -> Programs:
    return {"forward": models.exported(name)[2]}


def flow(seed: int) -> Programs:
    return {"forward": random_flow.export_random(seed)[1]}


PROGRAMS: Mapping[str, Callable[[], Programs]] = {
    "layers": lambda: layers(False),
    "dynamic layers": lambda: layers(True),
    "attention": lambda: {"forward": export(Attention(), (*(torch.ones(1, 2, 8, 4),) * 3, torch.zeros(8, 8)))},
    "enlarged": lambda: {"forward": export(Enlarged(), (torch.ones(1, 3, 8, 8),))},
    "numbers": lambda: {"forward": export(Numbers(), (torch.ones(4, 4), torch.arange(4)))},
    "state of two methods": cache,
    **{f"random {seed}": lambda seed=seed: flow(seed) for seed in range(6)},  # type: ignore[misc]
    **{name: lambda name=name: model(name) for name in models.MODELS},  # type: ignore[misc]
}
ON_HOST = ("layers", "dynamic layers", "numbers", "state of two methods", "random 1", "random 3", "convnext")


def files(programs: Programs, partitioners: Any, fast: bool, variants: Any = None, **options: Any) -> dict[str, bytes]:
    lowered = lower(programs, partitioners, options=LoweringOptions(fast=fast), variants=variants)
    assert lowered.fast is fast
    made = lowered.emit(**options)
    return {"": made.buffer, **made.data_files}


def check(programs: Programs, partitioners: Any, **options: Any) -> None:
    on, off = (files(programs, partitioners, fast, **options) for fast in (True, False))
    assert on == off


@pytest.mark.parametrize("name", PROGRAMS)
def test_files_are_the_same(name: str) -> None:
    check(PROGRAMS[name](), "xnnpack")


@pytest.mark.parametrize("name", ON_HOST)
def test_files_without_delegates_are_the_same(name: str) -> None:
    check(PROGRAMS[name](), None)


@pytest.mark.parametrize("dynamic", [False, True])
def test_quantised_files_are_the_same(dynamic: bool) -> None:
    check({"forward": quantized_models.quantized(dynamic)}, quantized_models.partitioners(dynamic))


@pytest.mark.parametrize(
    "options",
    [
        {"external_weights": "weights", "keep_originals": True, "constant_methods": {"size": 3}},
        {"variants": {"npu": ["xnnpack"], "cpu": None}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_files_of_any_form_are_the_same(options: dict[str, Any]) -> None:
    check({**layers(False), **cache()}, None if "variants" in options else "xnnpack", **options)
