"""Products with repeated matrices become products with the matrices themselves, wherever repeats are consecutive."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from rewriting_support import versions

from exir_lowering.rewrites import GroupedAttention, Identity

EXPAND = "aten.expand_copy.default"


class Grouped(torch.nn.Module):
    """Attention whose key and value heads are repeated as models of the transformers library do."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.repeats = repeats

    def _repeat(self, x: torch.Tensor) -> torch.Tensor:
        batch, heads, length, depth = x.shape
        x = x[:, :, None].expand(batch, heads, self.repeats, length, depth)
        return x.reshape(batch, heads * self.repeats, length, depth)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ (self._repeat(k).transpose(2, 3) * 0.3)
        return torch.softmax(scores, -1) @ self._repeat(v)


def heads(batch: int, kv: int, repeats: int, length: int, keys: int, depth: int) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(batch, kv * repeats, length, depth),
        torch.randn(batch, kv, keys, depth),
        torch.randn(batch, kv, keys, depth),
    )


@pytest.mark.parametrize("seed", range(24))
def test_any_sizes(seed: int) -> None:
    rng = random.Random(seed)
    batch, kv, length, keys, depth = (rng.randint(1, 4) for _ in range(5))
    repeats = rng.randint(2, 4)
    inputs = heads(batch, kv, repeats, length, keys, depth)
    found = versions(Grouped(repeats), inputs, [Identity(), GroupedAttention()])
    assert EXPAND in found.before and EXPAND not in found.after
    found.check(*inputs)
    odd = heads(batch, kv, repeats, length, keys, depth)
    odd[0].view(-1)[0], odd[1].view(-1)[-1], odd[2].view(-1)[0] = float("inf"), float("nan"), -0.0
    found.check(*odd)


@pytest.mark.parametrize("length", [1, 16])
def test_with_xnnpack(length: int) -> None:
    inputs = heads(1, 4, 2, length, 32, 16)
    found = versions(Grouped(2), inputs, [Identity(), GroupedAttention()], partitioners="xnnpack")
    assert EXPAND not in found.after
    found.check(*inputs)


class Other(torch.nn.Module):
    """Products with repeated matrices of other forms."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form

    def forward(self, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(q, self.form(x))


@pytest.mark.parametrize(
    ("form", "taken"),
    [
        (lambda x: x[:, None].expand(3, 2, 4, 5).reshape(6, 4, 5), True),
        (lambda x: (x[:, None].expand(3, 2, 4, 5).clone().reshape(6, 4, 5) / 3).double().float(), True),
        (lambda x: x[None].expand(2, 3, 4, 5).reshape(6, 4, 5), False),  # repeats are not consecutive
        (lambda x: x[:, :, None].expand(3, 4, 2, 5).reshape(6, 4, 5), False),  # rows are repeated
        (lambda x: x[:, None].expand(3, 2, 4, 5).permute(1, 0, 2, 3).reshape(6, 4, 5), False),
        (lambda x: x[:, None].expand(3, 2, 4, 5).reshape(6, 4, 5) * torch.arange(6.0)[:, None, None], False),
        (lambda x: x[:, None].expand(3, 2, 4, 5).reshape(6, 4, 5).clone().square(), False),
        (lambda x: (y := x[:, None].expand(3, 2, 4, 5).reshape(6, 4, 5)) * y, False),
        (lambda x: x[:1, None].expand(3, 2, 4, 5).reshape(6, 4, 5), False),  # two dimensions grow
        (lambda x: x[:, None].expand(3, 2, 4, 5).reshape(6, 5, 4).permute(0, 2, 1), True),
        (lambda x: x[:, None].expand(3, 2, 4, 5).reshape(2, 3, 4, 5).reshape(6, 4, 5), False),
        (lambda x: x[:, None].expand(3, 2, 4, 5).reshape(3, 40).reshape(6, 4, 5), True),
    ],
)
def test_other_forms(form: Any, taken: bool) -> None:
    inputs = (torch.randn(6, 3, 4), torch.randn(3, 4, 5))
    found = versions(Other(form), inputs, [GroupedAttention()])
    assert (EXPAND not in found.after) is taken
    found.check(*inputs)


def test_repeats_along_the_depth_or_of_an_empty_tensor_stay() -> None:
    class Empty(torch.nn.Module):
        def forward(self, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return torch.bmm(q, x[:, None].expand(3, 2, 0, 5).reshape(6, 0, 5))

    inputs = (torch.randn(6, 3, 0), torch.randn(3, 0, 5))
    found = versions(Empty(), inputs, [GroupedAttention()])
    assert found.before == found.after


def test_sizes_known_at_runtime_stay() -> None:
    inputs = heads(2, 2, 2, 3, 5, 4)
    length = torch.export.Dim("n", min=2, max=9)
    shapes = {"q": None, "k": {2: length}, "v": {2: length}}
    found = versions(Grouped(2), inputs, [GroupedAttention()], dynamic_shapes=shapes)
    assert found.before == found.after
    found.check(*heads(2, 2, 2, 3, 7, 4))
