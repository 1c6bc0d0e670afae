"""Where rules are listed, and how much they may make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exir_lowering.graphs.ranges.transfers import product

Rule = Callable[..., Any]

RULES: dict[str, Rule] = {}
"""Functions that compute what operators do by other ones; NotImplemented for what they do not cover."""

MASK = 2**24
"""How many elements what compares all pairs may have."""
UNROLLED = 32
"""How many rows or columns may be eliminated one after the other."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Make a function the rule of some operators; it takes what they take."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys((f"aten.{name}" for name in names), function))
        return function

    return add


def within(*sizes: Any) -> bool:
    """Return whether a tensor of these sizes is small enough for a mask."""
    return product(sizes) <= MASK


def widened(x: Tensor) -> Tensor:
    """Return half-precision floats in float32; sums and products of them are computed in that."""
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
