"""Shorthands for writing cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from exir_lowering.testing.samples import Case, CaseInput, CaseMethod

Hold = Callable[[], Mapping[str, Any]]


def nothing() -> Mapping[str, Any]:
    """Hold no parameters and no buffers."""
    return {}


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a tensor for a module to hold; the case's seed is set when it is built."""
    if not dtype.is_floating_point:
        return torch.randint(1, 9, shape, dtype=dtype)
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    return (torch.rand(shape, dtype=drawn) * 2 - 1).to(dtype)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    """Make a parameter."""
    return torch.nn.Parameter(weight(*shape, dtype=dtype))


def case(
    name: str,
    demand: str,
    function: Callable[..., Any],
    *inputs: CaseInput,
    hold: Hold = nothing,
    sizes: Mapping[str, tuple[int, int]] | None = None,
    least: int = 1,
    **rest: Any,
) -> Case:
    """Make a case of one method, which computes `function` of its module and its inputs.

    `hold` makes what the module holds. `sizes` has for each name in a shape its sizes in the first and the second call,
    `least` their least size, and `rest` further attributes of the case.
    """
    known = dict(sizes or {})
    return Case(name, demand, lambda: {"forward": CaseMethod(function, inputs, hold(), known, least)}, **rest)


def methods(
    name: str,
    demand: str,
    functions: Mapping[str, Callable[..., Any]],
    *inputs: CaseInput,
    hold: Callable[[], Mapping[str, Mapping[str, Any]]],
    **rest: Any,
) -> Case:
    """Make a case of several methods with the same inputs; `hold` says for each what its module holds."""

    def build() -> Mapping[str, CaseMethod]:
        held = hold()
        return {
            method: CaseMethod(function, inputs, held.get(method, {}), {}) for method, function in functions.items()
        }

    return Case(name, demand, build, **rest)
