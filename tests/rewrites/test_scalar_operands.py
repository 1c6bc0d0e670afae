"""Arithmetic with numbers and with constants gives the same bits; what would be rounded otherwise stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rewriting_support import always, bits, versions

from exir_lowering.rewrites import ScalarOperands

INF, NAN = float("inf"), float("nan")
ODD = torch.tensor([0.0, -0.0, INF, -INF, NAN, 1e-45, -1e-40, 3e38, 1.0, 1 / 3, -7.1, 16777217.0])


class All(torch.nn.Module):
    """Three operations with one number."""

    def __init__(self, number: Any) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ops = torch.ops.aten
        return tuple(op.Scalar(x, self.number) for op in (ops.mul, ops.add, ops.sub))


@pytest.mark.parametrize("number", [0.1, -0.0, 0, 3, 1 / 3, 16777217, INF, -INF, NAN, 1e-45, 1e-60, 3e38, 2**53 - 1])
def test_same_bits(number: Any) -> None:
    found = versions(All(number), (ODD,), [always(ScalarOperands)])
    assert not [name for name in found.after if name.endswith("Scalar")]
    for x in (ODD, torch.randn(12)):
        plain, rewritten = (program.run("forward", x) for program in (found.plain, found.rewritten))
        assert list(map(bits, found.model(x))) == list(map(bits, rewritten))
        if str(number) != "-0.0":  # files hold it as 0.0
            assert list(map(bits, plain)) == list(map(bits, rewritten))


class One(torch.nn.Module):
    def __init__(self, apply: Any) -> None:
        super().__init__()
        self.apply_to = apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply_to(x)


@pytest.mark.parametrize(
    ("apply", "x"),
    [
        (lambda x: torch.ops.aten.mul.Scalar(x, 0.1), torch.randn(4).half()),
        (lambda x: torch.ops.aten.mul.Scalar(x, 0.1), torch.randn(4).bfloat16()),
        (lambda x: torch.ops.aten.mul.Scalar(x, 0.1), torch.randn(4).double()),
        (lambda x: torch.ops.aten.mul.Scalar(x, 0.1), torch.arange(4)),
        (lambda x: torch.ops.aten.mul.Scalar(x, 3), torch.arange(4)),
        (lambda x: torch.ops.aten.mul.Scalar(x, 2**60 + 1), torch.randn(4)),
        (lambda x: torch.ops.aten.add.Scalar(x, 0.1, 3), torch.randn(4)),
        (lambda x: torch.ops.aten.div.Scalar(x, 0.1), torch.randn(4)),
    ],
)
def test_left_alone(apply: Any, x: torch.Tensor) -> None:
    found = versions(One(apply), (x,), [always(ScalarOperands)])
    assert found.before == found.after


def test_xnnpack_takes_it() -> None:
    model = One(lambda x: torch.ops.aten.mul.Scalar(x.relu(), 0.3).sigmoid())
    found = versions(model, (torch.randn(3, 4),), [always(ScalarOperands)], partitioners="xnnpack")
    assert len(found.after) < len(found.before)
    found.check(torch.randn(3, 4))


def test_layouts_empty_tensors_and_sizes_known_at_runtime() -> None:
    model = One(lambda x: torch.ops.aten.mul.Scalar(x, 0.3))
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found = versions(model, (image,), [always(ScalarOperands)])
    assert found.before == found.after
    versions(model, (torch.randn(0, 3),), [always(ScalarOperands)]).check(torch.randn(0, 3), exact=True)
    shapes = {"x": {0: torch.export.Dim("n", min=1, max=9)}}
    found = versions(model, (torch.randn(3, 4),), [always(ScalarOperands)], dynamic_shapes=shapes)
    assert found.after == ["aten.mul.Tensor"]
    for size in (1, 9):
        found.check(torch.randn(size, 4), exact=True)
