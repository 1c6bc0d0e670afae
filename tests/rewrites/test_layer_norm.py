"""Layer normalisation as arithmetic."""

from __future__ import annotations

import pytest
import torch
from rewriting_support import always, versions

from exir_lowering.rewrites import CommonSubexpressions, LayerNorm

NORM = "aten.native_layer_norm.default"
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("partitioners", [None, "xnnpack"])
@pytest.mark.parametrize(
    ("shape", "dims", "affine", "bias"),
    [
        ((256,), [256], True, True),
        ((3, 320), [320], True, True),
        ((2, 5, 256), [256], True, False),
        ((2, 5, 64), [5, 64], False, False),
        ((1, 2, 4, 256), [256], True, True),
        ((1, 2, 4, 64), [4, 64], True, True),
    ],
)
def test_forms(shape: tuple[int, ...], dims: list[int], affine: bool, bias: bool, partitioners: str | None) -> None:
    norm = torch.nn.LayerNorm(dims, elementwise_affine=affine, bias=bias)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    found = versions(norm, (torch.randn(shape),), [always(LayerNorm)], partitioners=partitioners)
    assert NORM in found.before and NORM not in found.after
    assert partitioners is None or set(found.after) == {"executorch_call_delegate", "getitem"}
    for scale in (1.0, 1e-20, 1e-3, 1e6, 1e15):
        found.check(torch.randn(shape) * scale, rtol=1e-4, atol=1e-5)
    if partitioners is None:
        for odd in (INF, -INF, NAN):
            x = torch.randn(shape)
            x.view(-1)[0] = odd
            eager, plain, rewritten = found.outputs(x)
            assert torch.equal(eager.isnan(), rewritten.isnan()) and torch.equal(plain.isnan(), rewritten.isnan())
            found.check(x, rtol=1e-4, atol=1e-5)


def test_squares_that_overflow_are_zero_or_nan_as_in_the_operator() -> None:
    found = versions(torch.nn.LayerNorm(8), (torch.randn(4, 8),), [always(LayerNorm)])
    for scale in (1e19, 1e21, 1e30, 3e38):
        for result in found.outputs(torch.tensor([1.0, -1, 1, 1, -1, 1, 1, -1]).expand(4, 8) * scale):
            assert ((result == 0) | result.isnan()).all()


def test_offsets_cost_a_few_roundings_of_the_input() -> None:
    torch.manual_seed(0)
    rounding = torch.finfo(torch.float32).eps  # of 4,500 random inputs, the worst one cost 6.7 more than without
    norm = torch.nn.LayerNorm(256)
    found = versions(norm, (torch.randn(4, 256),), [always(LayerNorm)])
    for offset in (1.0, 30.0, 1000.0):
        x = torch.randn(4, 256) + offset
        _, plain, rewritten = found.outputs(x)
        exact = norm.double()(x.double())
        norm.float()
        assert (rewritten - exact).abs().max() <= (plain - exact).abs().max() + 8 * rounding * offset + 1e-6


def test_left_alone() -> None:
    class Statistics(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.native_layer_norm(x, [4], None, None, 1e-5)

    for model, x in (
        (Statistics(), torch.randn(3, 4)),
        (torch.nn.LayerNorm(4).double(), torch.randn(3, 4).double()),
        (torch.nn.LayerNorm(4), torch.randn(0, 4)),
    ):
        found = versions(model, (x,), [always(LayerNorm)])
        assert found.before == found.after


def test_sizes_known_at_runtime() -> None:
    shapes = {"input": {0: torch.export.Dim("n", min=1, max=9)}}
    for shape in ((3, 8), (3, 5, 8)):
        norm = torch.nn.LayerNorm(8)
        found = versions(
            norm, (torch.randn(shape),), [always(LayerNorm), CommonSubexpressions()], dynamic_shapes=shapes
        )
        assert NORM not in found.after
        for size in (1, 9):
            found.check(torch.randn(size, *shape[1:]))
