"""Inputs that are bundled with a module, and how far results may be from those of eager PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from exir_lowering.errors import InputError
from exir_lowering.lowered_module.convention import Convention
from exir_lowering.lowered_module.record import Cases

TOLERANCES: Mapping[torch.dtype, float] = {
    **dict.fromkeys((torch.float64, torch.complex128), 1e-12),
    **dict.fromkeys((torch.float32, torch.complex64), 1e-4),
    **{torch.float16: 1e-2, torch.bfloat16: 5e-2},
}
"""How far results may differ from those of eager PyTorch, absolutely and relatively; integers may not differ."""

_SMALL = 0.25  # floating-point numbers of 8 bits and fewer


def tolerance(dtype: torch.dtype) -> float:
    """Return how far results of a type may differ from those of eager PyTorch: 0.0 for integers and bool."""
    return TOLERANCES.get(dtype, _SMALL) if dtype.is_floating_point or dtype.is_complex else 0.0


def bind(conventions: Mapping[str, Convention], given: Any) -> dict[str, Cases]:
    """Return the values in the arguments of calls, listed by method or for "forward"; InputError if one is invalid."""
    bound: dict[str, Cases] = {}
    for name, calls in (given if isinstance(given, Mapping) else {"forward": given}).items():
        if name not in conventions:
            known = ", ".join(map(repr, conventions))
            raise InputError(f"bundled_inputs: there is no method {name!r}; the module has {known}.")
        if not isinstance(calls, (list, tuple)) or not all(isinstance(call, (tuple, dict)) for call in calls):
            raise InputError(
                f"bundled_inputs[{name!r}]: got {type(calls).__name__}, expected a list of calls, each a tuple of "
                "positional arguments or a dict of arguments by name."
            )
        one = conventions[name]
        leaves = (one.bind((), call) if isinstance(call, dict) else one.bind(call, {}) for call in calls)
        bound[name] = tuple(map(copied, leaves))
    return bound


def copied(leaves: Sequence[Any]) -> list[Any]:
    """Return values, with copies of tensors, as the caller may write into its own."""
    return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def list_calls(convention: Convention, cases: Cases) -> tuple[Any, ...]:
    """Return bundled inputs as callers give them: tuples, or dicts when a parameter is keyword-only."""
    result: list[Any] = []
    for leaves in cases:
        args, kwargs = convention.arguments(copied(leaves))
        result.append({**dict(zip(convention.positional, args, strict=True)), **kwargs} if kwargs else args)
    return tuple(result)
