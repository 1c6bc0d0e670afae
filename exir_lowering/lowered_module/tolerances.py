"""How far results may differ from those of eager PyTorch, by element type."""

from __future__ import annotations

from collections.abc import Mapping

import torch

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""How far results may differ from those of eager PyTorch, absolutely and relatively; integers may not differ."""

_SMALL = 0.25  # floating-point numbers of 8 bits and fewer


def tolerance(dtype: torch.dtype) -> float:
    """Return how far results of a type may differ from those of eager PyTorch: 0.0 for integers and bool."""
    if not dtype.is_floating_point and not dtype.is_complex:
        return 0.0
    return TOLERANCES.get(dtype, _SMALL)
