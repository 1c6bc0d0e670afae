"""Rules for complex numbers, which the runtime makes by transforms of real ones only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exir_lowering.steps.legalizing.registry import require, rules


def _join(real: Tensor, imaginary: Tensor) -> Tensor:
    """Return complex numbers: the second coefficient of the transform of [x, 0, 0, y] is (x - 0) + (y - 0) i."""
    require(real.dtype in (torch.float32, torch.float64) and real.dtype is imaginary.dtype)
    broadcast: Any = torch.broadcast_tensors
    real, imaginary = broadcast(real, imaginary)
    none = torch.zeros_like(real)
    found: Tensor = torch.ops.aten._fft_r2c.default(
        torch.stack([real, none, none, imaginary], -1), [real.dim()], 0, True
    )
    return found.select(-1, 1)


def _parts(value: Tensor) -> tuple[Tensor, Tensor]:
    require(value.is_complex())
    pair = torch.view_as_real(value)
    return pair.select(-1, 0), pair.select(-1, 1)


def _conjugate(value: Tensor) -> Tensor:
    real, imaginary = _parts(value)
    return _join(real, -imaginary)


def _spectrum(value: Tensor, dim: int, norm: int) -> tuple[Tensor, Tensor]:
    """Return the parts of the whole transform of real numbers: the kernel makes half, of which the rest is a mirror."""
    size, value = value.shape[dim], value.movedim(dim, -1).contiguous()
    number = torch.arange(size)
    place, sign = torch.minimum(number, size - number), torch.where(2 * number <= size, 1, -1)
    half = _parts(torch.ops.aten._fft_r2c.default(value, [value.dim() - 1], norm, True))
    real, imaginary = (part.index_select(-1, place) for part in half)
    return real.movedim(-1, dim), (imaginary * sign).movedim(-1, dim)


def _transform(value: Tensor, dims: list[int], norm: int, forward: bool) -> Tensor:
    """Return the transform of a + bi: of a, and i times that of b; one back is with -i."""
    found, sign = _parts(value), 1 if forward else -1
    for dim in dims:
        (ar, ai), (br, bi) = (_spectrum(part, dim, norm) for part in found)
        found = ar - sign * bi, sign * ai + br
    return _join(*found)


def _transform_real(value: Tensor, dims: list[int], norm: int, onesided: bool) -> Tensor:
    require(not onesided and len(dims) == 1)
    return _join(*_spectrum(value, dims[0], norm))


rules(
    {
        "complex": _join,
        "polar": lambda size, angle: _join(size * torch.cos(angle), size * torch.sin(angle)),
        "view_as_complex_copy": lambda pair: _join(pair.select(-1, 0), pair.select(-1, 1)),
        "_conj_copy": _conjugate,
        "_neg_view_copy": torch.neg,
        "neg": lambda value: _join(*(-part for part in _parts(value))),
        "_fft_c2c": _transform,
        "_fft_r2c": _transform_real,
    }
)
