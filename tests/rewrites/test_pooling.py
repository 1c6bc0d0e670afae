"""Average pooling with ceil_mode, rewritten where the windows are the same without, or one window sees everything."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from rewriting_support import versions

from exir_lowering.rewrites import Pooling

POOL, MEAN = "aten.avg_pool2d.default", "aten.mean.dim"
INF, NAN = float("inf"), float("nan")


def adversarial(*shape: int) -> torch.Tensor:
    x = torch.randn(*shape)
    flat = x.view(-1)
    flat[0], flat[-1], flat[len(flat) // 2] = INF, NAN, -0.0
    return x


def _is_valid(form: tuple[Any, ...]) -> bool:
    try:
        torch.nn.functional.avg_pool2d(torch.zeros(1, 1, 5, 6), *form)
    except RuntimeError:
        return False
    return True


def test_same_windows_without_ceil_mode() -> None:
    pool = torch.nn.AvgPool2d(3, 2, padding=1, ceil_mode=True, count_include_pad=False)
    found = versions(pool, (torch.randn(2, 3, 9, 7),), [Pooling()], partitioners="xnnpack")
    assert found.before == [POOL] and found.after != [POOL]  # XNNPACK takes the new one
    found.check(torch.randn(2, 3, 9, 7))
    host = versions(pool, (torch.randn(2, 3, 9, 7),), [Pooling()])
    for x in (torch.randn(2, 3, 9, 7), adversarial(2, 3, 9, 7)):
        host.check(x, exact=True)


@pytest.mark.parametrize("part", range(3))
def test_every_geometry_is_equal_or_left_alone(part: int) -> None:
    class Pools(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([torch.nn.functional.avg_pool2d(x, *form).flatten() for form in forms])

    products = itertools.product((2, 3, 5, 7, 9, 12), (1, 2, 3, 11), (0, 1, 2), (True,), (True, False), (None, 5))
    forms = [form for form in products if _is_valid(form)]
    assert len(forms) > 100
    forms = forms[part::3]
    found = versions(Pools(), (torch.randn(1, 2, 5, 6),), [Pooling()])
    assert MEAN in found.after and found.after.count(POOL) == len(forms) - found.after.count(MEAN)
    found.check(torch.randn(1, 2, 5, 6))
    found.check(adversarial(1, 2, 5, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_window_larger_than_the_input(dtype: torch.dtype) -> None:
    pool = torch.nn.AvgPool2d(100, 100, ceil_mode=True)
    x = torch.randn(2, 3, 7, 5).to(dtype)
    found = versions(pool, (x,), [Pooling()])
    assert (POOL if dtype is torch.float16 else MEAN) in found.after and len(found.after) == 1 + 2 * (
        dtype is torch.float16
    )  # half precision is cast
    found.check(x, atol=1e-3 if dtype is torch.float16 else 1e-6)
    found.check(torch.full_like(x, INF))
    found.check(torch.zeros_like(x))


def test_padding_that_counts_is_not_a_mean() -> None:
    counted = versions(torch.nn.AvgPool2d(12, 12, 2, True, True), (torch.randn(1, 2, 7, 7),), [Pooling()])
    assert counted.after == [POOL]
    ignored = versions(torch.nn.AvgPool2d(12, 12, 2, True, False), (torch.randn(1, 2, 7, 7),), [Pooling()])
    assert ignored.after == [MEAN]
    ignored.check(torch.randn(1, 2, 7, 7))


def test_divisors() -> None:
    for divisor, after in ((49, MEAN), (50, POOL)):
        pool = torch.nn.AvgPool2d(12, 12, 2, True, True, divisor_override=divisor)
        found = versions(pool, (torch.randn(1, 2, 7, 7),), [Pooling()])
        assert found.after == [after]
        found.check(torch.randn(1, 2, 7, 7))


def test_integers_and_what_is_left_alone() -> None:
    one = versions(torch.nn.AvgPool2d(100, 100, ceil_mode=True), (torch.randn(3, 7, 7),), [Pooling()])
    assert one.after == [MEAN]  # without a batch
    one.check(adversarial(3, 7, 7))
    last = versions(torch.nn.AvgPool2d(3, 2, ceil_mode=True), (torch.randn(1, 2, 8, 8),), [Pooling()])
    assert last.before == last.after
    last.check(torch.randn(1, 2, 8, 8))


def test_sizes_known_at_runtime() -> None:
    shapes = {"input": {2: torch.export.Dim("h", min=4, max=20)}}
    pool = torch.nn.AvgPool2d(3, 1, ceil_mode=True)
    found = versions(pool, (torch.randn(1, 2, 9, 9),), [Pooling()], dynamic_shapes=shapes)
    for height in (4, 9, 20):
        found.check(torch.randn(1, 2, height, 9), exact=True)
    batches = {"input": {0: torch.export.Dim("n", min=2, max=20)}}
    pool = torch.nn.AvgPool2d(30, 30, ceil_mode=True)
    found = versions(pool, (torch.randn(3, 2, 9, 9),), [Pooling()], dynamic_shapes=batches)
    for batch in (2, 20):
        found.check(torch.randn(batch, 2, 9, 9))
