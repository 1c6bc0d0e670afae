"""Where rules are listed, how much they may make, and in which types they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from exir_lowering._upstream.programs import pytree
from exir_lowering.graphs.measures import tensors
from exir_lowering.graphs.ranges.nodes import product

Rule = Callable[..., Any]

RULES: dict[str, Rule] = {}
"""Functions that compute what operators do by other ones; NotImplemented for what they do not cover."""

MASK = 2**24
"""How many elements what compares all pairs may have."""


class NotCovered(Exception):
    """A rule does not cover its arguments."""


def rule(*names: str, wide: torch.dtype | None = None) -> Callable[[Rule], Rule]:
    """Make a function the rule of some operators; it takes what they take, in a wider type if one is given."""

    def add(function: Rule) -> Rule:
        inner = function if wide is None else widening(function, wide)

        def computed(*args: Any, **kwargs: Any) -> Any:
            try:
                return inner(*args, **kwargs)
            except NotCovered:
                return NotImplemented

        named = (f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names)
        RULES.update(dict.fromkeys(named, computed))
        return function

    return add


def widening(function: Rule, wide: torch.dtype) -> Rule:
    """Compute with floats of a wider type, and give the results the type of the first of them, or the default one."""

    def computed(*args: Any, **kwargs: Any) -> Any:
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        require(not any(each.is_complex() for each in given))
        floats = [each.dtype for each in given if each.is_floating_point()]

        def widen(value: Any) -> Any:
            if not isinstance(value, Tensor) or (floats and not value.is_floating_point()):
                return value
            return value.to(wide) if wide is torch.float64 else widened(value)

        def narrow(value: Any) -> Any:
            floating = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(floats[0] if floats else torch.get_default_dtype()) if floating else value

        given = pytree.tree_map(widen, (args, kwargs))
        return pytree.tree_map(narrow, function(*given[0], **given[1]))

    return computed


def require(covered: bool) -> None:
    """Let a rule cover only some arguments."""
    if not covered:
        raise NotCovered


def require_small(*sizes: Any) -> None:
    """Let a rule cover only what makes tensors of these sizes that are small enough for a mask."""
    require(product(sizes) <= MASK)


def widened(x: Tensor) -> Tensor:
    """Return half-precision floats in float32; sums and products of them are computed in that."""
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def in_dtype(run: Any, narrow: Sequence[torch.dtype], wide: torch.dtype, node: Node) -> Callable[..., Any]:
    """Return a function that computes with tensors of some types cast to another one, with results as a node's."""
    dtypes = [value.dtype for value in tensors(node.meta["val"])]

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in narrow:
            return value.to(wide)
        return wide if isinstance(value, torch.dtype) and value in narrow else value

    def compute(*args: Any, **kwargs: Any) -> Any:
        found = run(*pytree.tree_map(cast, args), **pytree.tree_map(cast, kwargs))
        if isinstance(found, torch.Tensor):
            return found.to(dtypes[0])
        return tuple(value.to(dtype) for value, dtype in zip(found, dtypes, strict=True))

    return compute
