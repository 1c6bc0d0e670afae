"""What a reference payload can call besides torch's operators: those of Edge dialect, and those that call graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from exir_lowering import InputError
from exir_lowering.graphs.operators import calls as checked_calls, functions, pure as pure_operators


def _to_dim_order(tensor: torch.Tensor, *, dtype: Any = None, dim_order: Any = None, **rest: Any) -> torch.Tensor:
    """Copy a tensor, to another dtype and dimension order if requested."""
    if dim_order is None:
        return tensor.to(dtype=dtype or tensor.dtype, copy=True)
    return torch.empty_permuted(tensor.shape, dim_order, dtype=dtype or tensor.dtype).copy_(tensor)


def _empty_dim_order(size: Any, *, dtype: Any = None, dim_order: Any = None, **rest: Any) -> torch.Tensor:
    return torch.empty_permuted(size, tuple(dim_order or range(len(size))), dtype=dtype)


EDGE: Mapping[str, Callable[..., Any]] = {
    "dim_order_ops._to_dim_order_copy.default": _to_dim_order,
    "dim_order_ops._clone_dim_order.default": _to_dim_order,
    "dim_order_ops._empty_dim_order.default": _empty_dim_order,
}
"""The operators of Edge dialect that torch does not have."""


def cond(predicate: Any, yes: Callable[..., Any], no: Callable[..., Any], operands: Any = ()) -> Any:
    """Call one of two graphs."""
    return (yes if bool(predicate) else no)(*operands)


def map_rows(body: Callable[..., Any], columns: Any, unchanged: Any = ()) -> Any:
    """Call a graph for each row of some tensors, and stack the results."""
    return scan(body, (), columns, unchanged)


def scan(step: Callable[..., Any], init: Any, columns: Any, unchanged: Any = ()) -> Any:
    """Call a graph for each row of some tensors, carrying values from row to row."""
    carry, rows = list(init), []
    for i in range(len(columns[0])):
        results = step(*carry, *(column[i] for column in columns), *unchanged)
        carry = list(results[: len(carry)])
        rows.append(results[len(carry) :])
    if rows:
        return [*carry, *(torch.stack(list(results)) for results in zip(*rows, strict=True))]
    row = [torch.zeros(column.shape[1:], dtype=column.dtype) for column in columns]
    results = step(*carry, *row, *unchanged)[len(carry) :]
    return [*carry, *(torch.empty((0, *result.shape), dtype=result.dtype) for result in results)]


def while_loop(condition: Callable[..., Any], body: Callable[..., Any], carried: Any, unchanged: Any = ()) -> Any:
    """Call a graph as long as another one returns true."""
    values = list(carried)
    while True:
        go_on = condition(*values, *unchanged)
        if not bool(go_on[0] if isinstance(go_on, (list, tuple)) else go_on):
            return values
        values = list(body(*values, *unchanged))


HIGHER_ORDER: Mapping[str, Callable[..., Any]] = {
    "cond": cond,
    "map_impl": map_rows,
    "scan": scan,
    "while_loop": while_loop,
}
"""Operators that call graphs, by torch's name."""


def resolve(name: str) -> Callable[..., Any]:
    """Find an operator by the name in a payload; InputError if it is not one on the closed list, registered here."""
    own = HIGHER_ORDER.get(name) or EDGE.get(name) or functions.find_function(name)
    if own is not None:
        return own
    found = pure_operators.find(name)
    if found is not None:
        return checked_calls.CheckedCall(name.split(".")[1], found)
    raise InputError(
        f"Operator {pure_operators.why_not(name)}, so a reference payload cannot call it. Lower the model again with "
        f"this version of exir-lowering and of torch ({torch.__version__}): what the backend cannot call stays on the "
        "host."
    )
