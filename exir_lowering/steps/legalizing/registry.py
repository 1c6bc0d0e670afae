"""Where rules are listed, how much they may make, and in which types they compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from exir_lowering._upstream.programs import pytree
from exir_lowering.graphs.ranges.nodes import product

Rule = Callable[..., Any]

RULES: dict[str, Rule] = {}
"""Functions that compute what operators do by other ones.

Their results may be in a wider type; None stands for a result that is not computed, as hardly anything reads it.
"""

MASK = 2**24
"""How many elements what compares all pairs may have."""

HALF = (torch.float16, torch.bfloat16)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32)
_NUMBERS = (*HALF, torch.float32, torch.bool, *WHOLE, torch.int64)


class Failed(Exception):
    """Nothing is known that computes a call and runs; its text is a clause that says why."""


def rules(table: Mapping[str, Rule], wide: torch.dtype | None = None) -> None:
    """Add rules by the names of operators; with float32 half precision is computed in it, with float64 everything."""
    for names, function in table.items():
        if wide is not None:
            function = in_dtype(function, HALF if wide is torch.float32 else _NUMBERS, wide)
        for name in names.split():
            RULES[f"aten.{name}" if "." in name else f"aten.{name}.default"] = function


def require(covered: bool) -> None:
    """Let a rule cover only some arguments."""
    if not covered:
        raise Failed("its rule does not cover these arguments")


def require_small(*sizes: Any) -> None:
    """Let a rule cover only what makes tensors of these sizes that are small enough for a mask."""
    require(product(sizes) <= MASK)


def in_dtype(function: Rule, narrow: Sequence[torch.dtype], wide: torch.dtype) -> Rule:
    """Return a function that computes with tensors of some types cast to another one."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            require(not value.is_complex())
            return value.to(wide) if value.dtype in narrow else value
        return wide if isinstance(value, torch.dtype) and value in narrow else value

    def computed(*args: Any, **kwargs: Any) -> Any:
        return function(*pytree.tree_map(cast, args), **pytree.tree_map(cast, kwargs))

    return computed
