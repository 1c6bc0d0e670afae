"""Complex numbers on the host: exact, transformed as in eager mode, and refused where no kernel computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fft, view_as_real
from torch.export import Dim, export

from exir_lowering import InputError, load, lower

ODD = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.0, 3e38, 1e-40])
X, TURNS = torch.randn(2, 6, 8), torch.polar(torch.ones(6, 4), torch.randn(6, 4))


class Function(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding as the first language models wrote it."""
    return view_as_real(torch.view_as_complex(x.reshape(2, -1, 4, 2)) * TURNS[: x.shape[1]]).flatten(2)


EXACT: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "parts": (lambda x: view_as_real(torch.complex(x, x.flip(0))), ODD),
    "polar": (lambda x: view_as_real(torch.polar(x.abs(), x * 3)), X),
    "rotated": (rotate, X),
}
CLOSE: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "two dimensions": (lambda x: fft.fftn(x, dim=(1, 2)).real, X),
    "back": (lambda x: fft.ifft(fft.fft(x) * fft.fft(x * 2)).real, X),
    "complex": (lambda x: view_as_real(fft.fftn(torch.complex(x, x * x), norm="ortho", dim=(0, 2))), X),
    "odd sizes": (
        lambda x: view_as_real(fft.ifft2(torch.complex(x, x * x))),
        torch.randn(2, 5, 7, dtype=torch.float64),
    ),
    "a size of 1": (lambda x: view_as_real(fft.fft2(x)), torch.randn(1, 3)),
    "conjugate": (lambda x: view_as_real(-fft.rfft(x).conj() * fft.rfft(x * 2)), X),
}


@pytest.mark.parametrize("case", [*EXACT, *CLOSE])
def test_as_in_eager_mode(case: str) -> None:
    function, x = {**EXACT, **CLOSE}[case]
    loaded = load(lower(export(Function(function), (x,))).emit().buffer)
    for value in (x, x.flip(-1)):
        (got,) = loaded.run("forward", value)
        if case in EXACT:
            torch.testing.assert_close(got, function(value), rtol=0, atol=0, equal_nan=True)
            assert torch.equal(got.signbit(), function(value).signbit())
        else:
            torch.testing.assert_close(got, function(value))


@pytest.mark.parametrize("function", [rotate, lambda x: fft.fft2(x).real, lambda x: fft.ifft(x, dim=1).imag])
def test_any_number_of_rows(function: Callable[[Tensor], Tensor]) -> None:
    program = export(Function(function), (X,), dynamic_shapes=({1: Dim("rows", min=2, max=6)},))
    loaded = load(lower(program).emit().buffer)
    for rows in (6, 5, 2, 3):
        (got,) = loaded.run("forward", X[:, :rows].contiguous())
        torch.testing.assert_close(got, function(X[:, :rows].contiguous()))


@pytest.mark.parametrize("function", [torch.exp, torch.sqrt, lambda z: z.cumsum(1), lambda z: z.to(torch.complex128)])
def test_what_no_kernel_computes_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    program = export(Function(lambda x: view_as_real(function(fft.rfft(x)))), (X,))
    with pytest.raises(InputError, match="complex number"):
        lower(program)
