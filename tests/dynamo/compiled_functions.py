"""Functions in eager PyTorch and through torch.compile: what they return, what they write, and what it aliases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from exir_lowering.dynamo import GraphReport, backend, reports
from exir_lowering.lowered_module.bundled import tolerance

Make = Callable[[], Sequence[Any]]


@dataclass
class Call:
    """What one call did.

    Attributes:
        outputs: What was returned, flat, and after it the inputs.
        gradients: Those of the leaves that the inputs were made of.
        aliases: For each tensor of `outputs`, those that share its memory.
        forms: For each tensor of `outputs`, its type, shape, and the order in memory of the dimensions that matter.
        written: The same tensors after each output has been written into.
    """

    outputs: list[Any]
    gradients: list[Any]
    aliases: list[Any]
    forms: list[Any]
    written: list[Any]


def same(
    function: Callable[..., Any],
    make: Make,
    *,
    partitioners: Any = "reference",
    training: bool = False,
    views: Callable[..., Sequence[Any]] | None = None,
    write: bool = True,
    options: dict[str, Any] | None = None,
    lowered: bool = True,
    **how: Any,
) -> tuple[GraphReport, ...]:
    """Check that a compiled function does what it does in eager PyTorch, in two calls.

    Args:
        function: The function.
        make: Returns its inputs.
        partitioners: What is partitioned.
        training: Whether the inputs require gradients; the function gets copies, so that it can write into them.
        views: Returns what the function gets instead of these inputs, such as views of them.
        write: Whether what is returned is written into afterwards.
        options: Other options of the backend.
        lowered: Whether it is an error if something else runs it.
        how: What else torch.compile gets.

    Returns:
        What was done for each graph.
    """
    compiled = torch.compile(
        function, backend=backend, options={"partitioners": partitioners, **(options or {})}, **how
    )
    for _ in range(2):
        right, got = (_call(each, make, training, views, write) for each in (function, compiled))
        for name in ("aliases", "forms"):
            if getattr(got, name) != getattr(right, name):
                raise AssertionError(f"{name}: {getattr(got, name)} instead of {getattr(right, name)}")
        for name in ("outputs", "gradients", "written"):
            close(getattr(got, name), getattr(right, name), name)
    found = reports()
    if lowered and any(report.backend != "exir_lowering" for report in found):
        raise AssertionError("\n".join(map(str, found)))
    return found


def close(got: Sequence[Any], right: Sequence[Any], what: str) -> None:
    """Compare values, tensors by the tolerance of their type; AOTAutograd may return zeros for no gradient."""
    for number, (one, other) in enumerate(zip(got, right, strict=True)):
        if not isinstance(other, torch.Tensor):
            zeros = what == "gradients" and other is None and isinstance(one, torch.Tensor) and not one.any()
            if one != other and not zeros:
                raise AssertionError(f"{what}[{number}]: {one!r} instead of {other!r}")
            continue
        most = tolerance(other.dtype)
        torch.testing.assert_close(
            one, other, atol=most, rtol=most, equal_nan=True, msg=f"{what}[{number}]: {{}}".format
        )


def _call(function: Any, make: Make, training: bool, views: Any, write: bool) -> Call:
    torch.manual_seed(5)
    leaves = [value.requires_grad_(training and value.is_floating_point()) if _is(value) else value for value in make()]
    given = [value * 1 if _is(value) and value.requires_grad else value for value in leaves]
    given = list(views(*given)) if views is not None else given
    torch.manual_seed(7)
    returned = pytree.tree_leaves(function(*given), is_leaf=lambda value: value is None)
    values = [*returned, *pytree.tree_leaves(given)]
    outputs, aliases, forms = _copied(values), [_aliases(value, values) for value in values], list(map(_form, values))
    terms = [_weighted(value) for value in returned if _is(value) and value.requires_grad]
    if terms:
        torch.stack(terms).sum().backward()
    with torch.no_grad():
        for number, value in enumerate(returned if write else ()):
            if _is(value) and value.is_floating_point() and 0 not in value.stride():
                value.add_(number + 1)
    gradients = [value.grad for value in leaves if _is(value)]
    return Call(outputs, gradients, aliases, forms, _copied(values))


def _is(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _copied(values: Sequence[Any]) -> list[Any]:
    return [value.detach().clone() if _is(value) else value for value in values]


def _weighted(value: torch.Tensor) -> torch.Tensor:
    return (value * torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view(value.shape)).sum()


def _aliases(value: Any, values: Sequence[Any]) -> list[int]:
    if not _is(value) or not value.numel():
        return []
    memory = value.untyped_storage().data_ptr()
    return [n for n, other in enumerate(values) if _is(other) and other.untyped_storage().data_ptr() == memory]


def _form(value: Any) -> Any:
    if not _is(value):
        return type(value).__name__
    moved = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1]
    return value.dtype, tuple(value.shape), moved if value.numel() else [], value.requires_grad
