"""What a reference payload can call, by name: torch's operators, arithmetic on sizes, higher-order operators."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from exir_lowering import InputError
from exir_lowering.graphs.operators import calls as checked_calls, pure as pure_operators

PYTHON: Mapping[str, Callable[..., Any]] = {
    **{
        name: getattr(operator, name)
        for name in (
            "abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "invert", "le", "lshift", "lt", "mod", "mul",
            "ne", "neg", "not_", "or_", "pos", "pow", "rshift", "sub", "truediv", "xor",
        )
    },
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "sqrt", "trunc")},
    **{
        f"torch.{name}": getattr(torch, name)
        for name in ("sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sqrt", "sym_sum")
    },
    "max": max,
    "min": min,
    "round": round,
}  # fmt: skip
"""Python functions that exported graphs call, on sizes and on lists of results."""


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
    rows = [body(*(column[i] for column in columns), *unchanged) for i in range(len(columns[0]))]
    if not rows:
        return _no_rows(body(*map(_zero_row, columns), *unchanged))
    return [torch.stack(list(results)) for results in zip(*rows, strict=True)]


def scan(step: Callable[..., Any], init: Any, columns: Any, unchanged: Any = ()) -> Any:
    """Call a graph for each row of some tensors, carrying values from row to row."""
    carry, rows = list(init), []
    for i in range(len(columns[0])):
        results = step(*carry, *(column[i] for column in columns), *unchanged)
        carry = list(results[: len(carry)])
        rows.append(results[len(carry) :])
    if not rows:
        return [*carry, *_no_rows(step(*carry, *map(_zero_row, columns), *unchanged)[len(carry) :])]
    return [*carry, *(torch.stack(list(results)) for results in zip(*rows, strict=True))]


def while_loop(condition: Callable[..., Any], body: Callable[..., Any], carried: Any, unchanged: Any = ()) -> Any:
    """Call a graph as long as another one returns true."""
    values = list(carried)
    while True:
        go_on = condition(*values, *unchanged)
        if not bool(go_on[0] if isinstance(go_on, (list, tuple)) else go_on):
            return values
        values = list(body(*values, *unchanged))


def _zero_row(column: torch.Tensor) -> torch.Tensor:
    return torch.zeros(column.shape[1:], dtype=column.dtype)


def _no_rows(results: Any) -> Any:
    return [torch.empty((0, *result.shape), dtype=result.dtype) for result in results]


HIGHER_ORDER: Mapping[str, Callable[..., Any]] = {
    "cond": cond,
    "map_impl": map_rows,
    "scan": scan,
    "while_loop": while_loop,
}
"""Operators that call graphs, by torch's name."""


_NUMBERS = (bool, int, float)
_LARGEST_SHIFT = 63


def _of_numbers(name: str) -> Callable[..., Any]:
    """Return a Python function that only takes numbers: with other types it could do more, such as repeat a text."""
    function = PYTHON[name]

    def compute(*args: Any) -> Any:
        given = args[0] if name == "torch.sym_sum" and len(args) == 1 else args
        if not isinstance(given, (list, tuple)) or not all(isinstance(value, _NUMBERS) for value in given):
            raise TypeError(f"{name} takes numbers, got {', '.join(type(value).__name__ for value in args)}")
        whole = all(isinstance(value, int) for value in given)
        if name in ("pow", "lshift") and whole and abs(given[-1]) > _LARGEST_SHIFT:
            raise OverflowError(f"{name} by {given[-1]}")  # the file could ask for any number of digits
        result = function(*args)
        if isinstance(result, int) and not -(2**63) <= result < 2**63:
            raise OverflowError(f"{name} gave {result}, expected a 64-bit number")
        return result

    return compute


def _getitem(values: Any, index: Any) -> Any:
    if not isinstance(values, (list, tuple)) or not isinstance(index, int):
        raise TypeError(f"getitem takes a list and a number, got a {type(values).__name__}")
    return values[index]


def resolve(name: str) -> Callable[..., Any]:
    """Find an operator by the name in a payload; a `CheckedCall` for torch's own.

    Raises InputError if it is not registered in this process, or not on the closed list of operators that only compute.
    """
    if name in HIGHER_ORDER:
        return HIGHER_ORDER[name]
    if name in EDGE:
        return EDGE[name]
    if name in PYTHON:
        return _getitem if name == "getitem" else _of_numbers(name)
    found = pure_operators.find(name)
    if found is not None:
        return checked_calls.CheckedCall(name.split(".")[1], found)
    raise InputError(
        f"Operator {pure_operators.why_not(name)}, so a reference payload cannot call it. Lower the model again with "
        f"this version of exir-lowering and of torch ({torch.__version__}): what the backend cannot call stays on the "
        "host."
    )
