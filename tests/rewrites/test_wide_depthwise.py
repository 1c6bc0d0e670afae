"""Depthwise convolutions with large kernels are sums of smaller ones."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from rewriting_support import always, versions

from exir_lowering.rewrites import WideDepthwise
from exir_lowering.rewrites.wide_depthwise import _split

CONVOLUTION = "aten.convolution.default"


def test_sets_are_symmetric_and_each_row_is_in_one() -> None:
    for count, most in itertools.product(range(1, 16), range(2, 13)):
        sets = _split(count, most)
        assert sorted(row for rows in sets for row in rows) == list(range(count)), (count, most)
        for rows in sets:
            assert len(rows) <= most and rows[0] == count - 1 - rows[-1], (count, most)
            assert len({after - before for before, after in itertools.pairwise(rows)}) <= 1, (count, most)


@pytest.mark.parametrize("seed", range(20))
def test_any_geometry(seed: int) -> None:
    rng = random.Random(seed)
    channels, height, width = rng.randint(2, 5), rng.randint(3, 12), rng.randint(3, 12)
    if height * width <= 25:
        height = 9
    dilation = (rng.randint(1, 2), rng.randint(1, 2))
    padding = (dilation[0] * (height // 2) + rng.randint(0, 2), rng.randint(0, width))
    convolution = torch.nn.Conv2d(
        channels,
        channels * rng.randint(1, 2),
        (height, width),
        stride=(rng.randint(1, 3), rng.randint(1, 2)),
        padding=padding,
        dilation=dilation,
        groups=channels,
        bias=rng.random() < 0.7,
    )
    x = torch.randn(rng.randint(1, 2), channels, rng.randint(20, 25), rng.randint(25, 30))
    found = versions(convolution, (x,), [always(WideDepthwise)])
    assert found.before == [CONVOLUTION] and found.after.count(CONVOLUTION) > 1
    found.check(x, rtol=1e-4, atol=1e-5)
    for odd in (float("inf"), float("-inf"), float("nan")):
        x.view(-1)[rng.randrange(x.numel())] = odd
        eager, plain, rewritten = found.outputs(x)
        assert torch.equal(plain.isnan(), rewritten.isnan()) and torch.equal(eager.isnan(), rewritten.isnan())
        found.check(x, rtol=1e-4, atol=1e-5)


def test_as_convnext_has_it_with_xnnpack_and_channels_last() -> None:
    convolution = torch.nn.Conv2d(16, 16, 7, padding=3, groups=16)
    x = torch.randn(1, 16, 14, 14)
    found = versions(convolution, (x,), [always(WideDepthwise)], partitioners="xnnpack")
    assert CONVOLUTION not in found.after and "aten.add.Tensor" not in found.after
    found.check(x)
    last = x.to(memory_format=torch.channels_last)
    versions(convolution, (last,), [always(WideDepthwise)]).check(last)
    shapes = {"input": {0: torch.export.Dim("n", min=1, max=4), 2: torch.export.Dim("h", min=8, max=20)}}
    found = versions(convolution, (torch.randn(2, 16, 14, 14),), [always(WideDepthwise)], dynamic_shapes=shapes)
    assert found.after.count(CONVOLUTION) == 3
    for batch, height in ((1, 8), (4, 20)):
        found.check(torch.randn(batch, 16, height, 14))


class Given(torch.nn.Module):
    """A convolution whose weight is an input."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x, w, padding=3, groups=4)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (torch.nn.Conv2d(4, 4, 5, padding=2, groups=4), (torch.randn(1, 4, 9, 9),)),
        (torch.nn.Conv2d(4, 4, 7, padding=3, groups=2), (torch.randn(1, 4, 9, 9),)),
        (torch.nn.Conv2d(4, 4, 7, padding=1, groups=4), (torch.randn(1, 4, 9, 9),)),  # padding of the middle rows < 0
        (torch.nn.Conv2d(4, 4, 7, padding=0, groups=4), (torch.randn(1, 4, 9, 9),)),
        (torch.nn.Conv2d(4, 4, (3, 13), padding=(1, 6), groups=4), (torch.randn(1, 4, 15, 15),)),
        (torch.nn.Conv1d(4, 4, 31, padding=15, groups=4), (torch.randn(1, 4, 40),)),
        (torch.nn.Conv2d(4, 4, 7, padding=3, groups=4).double(), (torch.randn(1, 4, 9, 9).double(),)),
        (torch.nn.ConvTranspose2d(4, 4, 7, padding=3, groups=4), (torch.randn(1, 4, 9, 9),)),
        (Given(), (torch.randn(1, 4, 9, 9), torch.randn(4, 1, 7, 7))),
    ],
)
def test_left_alone(model: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
    found = versions(model, inputs, [always(WideDepthwise)])
    assert found.before == found.after


def test_the_file_does_not_grow_by_the_kernel() -> None:
    from exir_lowering import LoweringOptions, lower

    program = torch.export.export(torch.nn.Conv2d(64, 64, 9, padding=4, groups=64), (torch.randn(1, 64, 9, 9),))
    sizes = [
        len(lower(program, options=LoweringOptions(rewrites=chosen)).emit().buffer)
        for chosen in ("none", [always(WideDepthwise)])
    ]
    assert sizes[1] < sizes[0] + 4096
