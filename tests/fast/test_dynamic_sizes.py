"""Programs that compute with their dynamic sizes, which the fast conversion covers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import both_ways
import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export
from torch.nn import functional as F


class Of(nn.Module):
    """Calls a function on two tensors, with layers at hand."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.linear, self.embedding = function, nn.Linear(8, 8), nn.Embedding(64, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.function(self, x, y)


def program_of(function: Callable[..., Any]) -> ExportedProgram:
    torch.manual_seed(0)
    axes = {0: Dim.AUTO, 1: Dim.AUTO}
    inputs = (torch.randn(3, 6, 8), torch.randn(3, 6))
    return export(Of(function), inputs, dynamic_shapes=(axes, axes), strict=False)


def half(m: Of, x: torch.Tensor, y: torch.Tensor) -> Any:
    t, h = x.shape[1], x + 1
    zeros = h.new_zeros(x.shape[0], 2 * t) + x.shape[0]
    return h[:, : t // 2] * 2, torch.arange(2 * t), zeros, torch.cat([h, h], 1).relu()


def attention(m: Of, x: torch.Tensor, y: torch.Tensor) -> Any:
    b, t, _ = x.shape
    h = m.linear(x) + m.embedding(torch.arange(t))
    mask = (y > 0)[:, None, None, :].expand(b, 1, t, t)
    for _ in range(2):  # the second call finds the sizes that the first one computes
        q = h.view(b, t, 2, 4).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).contiguous().view(b, t, 8)
    return h, h.view(b * t, 8), x.shape[0] * x.shape[1]


def repeated(m: Of, x: torch.Tensor, y: torch.Tensor) -> Any:
    t = x.shape[1]
    return x.repeat(2 * t, 1, 1), F.pad(x, (0, 0, 0, t - 1)), torch.ones(t, 2 * t).tril(), x.expand(t + 1, *x.shape) + 0


def turned_out_to_be_a_number(m: Of, x: torch.Tensor, y: torch.Tensor) -> Any:
    t = x.shape[1] + 1
    return x.new_full((t, t), 0.0), torch.arange(t) * t, torch.linspace(0, 1, t)


def rolled(m: Of, x: torch.Tensor, y: torch.Tensor) -> Any:
    t = x.shape[1]
    return x.narrow(1, 0, t - 1) + 1, x.roll(1, 1), x.flatten(0, 1).unflatten(0, (x.shape[0], -1)), x[:, 1 : t - 1] * 2


def read_by_decompositions_only(m: Of, x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.einsum("btd,bsd->bts", x, m.linear(x)), x.softmax(1), x.flip(1), torch.outer(y[0], y[0])


def largest(m: Of, x: torch.Tensor, y: torch.Tensor) -> Any:
    t = x.shape[1]
    return x.new_zeros(torch.sym_max(t, x.shape[0])), x.new_zeros((t + 7) // 8 * 8)


COVERED = [half, attention, repeated, turned_out_to_be_a_number, rolled, read_by_decompositions_only, largest]


@pytest.mark.parametrize("function", COVERED, ids=lambda function: function.__name__)
@pytest.mark.parametrize("way", ["xnnpack unchecked", "none unchecked"])
def test_both_ways_are_equal(function: Callable[..., Any], way: str) -> None:
    outcome = both_ways.compare(program_of(function), way)
    assert (outcome.differences, outcome.left) == ([], ())


def divided(m: Of, x: torch.Tensor, y: torch.Tensor) -> Any:
    resized = F.interpolate(x[:, None], size=(x.shape[1] + 1, 9), mode="bicubic")
    return x / x.shape[1] ** 0.5, x.sum() / x.numel(), resized


def test_what_is_not_covered_goes_the_other_way_untouched() -> None:
    outcome = both_ways.compare(program_of(divided), "xnnpack unchecked")
    assert outcome.differences == []
    assert outcome.left


def test_numbers_as_inputs_beside_dynamic_sizes() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> Any:
            return F.avg_pool1d(x, 2) * n, x.shape[0]

    program = export(Scaled(), (torch.randn(3, 4), 3), dynamic_shapes=({0: Dim.AUTO}, None), strict=False)
    assert both_ways.compare(program, "xnnpack unchecked").differences == []


@pytest.mark.parametrize("way", ["xnnpack unchecked", "none unchecked"])
def test_sizes_as_inputs(way: str) -> None:
    class Sized(nn.Module):
        def forward(self, n: int, x: torch.Tensor) -> Any:
            return F.avg_pool1d(x, 2) * n, x.new_zeros(n) + x[0, 0], x[:, : x.shape[1] - n].softmax(1), n

    shapes = (Dim.DYNAMIC, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC})
    program = export(Sized(), (3, torch.randn(3, 8)), dynamic_shapes=shapes, strict=False)
    assert any(
        isinstance(node.meta.get("val"), torch.SymInt) for node in program.graph.nodes if node.op == "placeholder"
    )
    outcome = both_ways.compare(program, way)
    assert (outcome.differences, outcome.left) == ([], ())
