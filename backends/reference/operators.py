"""What a reference payload can call, by name: torch's operators, arithmetic on sizes, operators that call graphs."""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from exir_lowering import InputError

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
    """Copy a tensor: to another type, and to memory in which its dimensions follow each other as they should."""
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
"""Operators of Edge dialect that torch does not have, as what they mean."""

_LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "quantized_decomposed": ("torch.ao.quantization.fx", "executorch.exir"),
}
"""What has to be imported for the operators of a namespace to be there."""


_OVERLOAD = type(torch.ops.aten.add.Tensor)


def cond(predicate: Any, yes: Callable[..., Any], no: Callable[..., Any], operands: Any = ()) -> Any:
    """Call one of two graphs."""
    return (yes if bool(predicate) else no)(*operands)


def map_rows(body: Callable[..., Any], columns: Any, unchanged: Any = ()) -> Any:
    """Call a graph for each row of some tensors, and stack what it returns."""
    rows = [body(*(column[i] for column in columns), *unchanged) for i in range(len(columns[0]))]
    if not rows:
        return _no_rows(body(*map(_zero_row, columns), *unchanged))
    return [torch.stack(list(results)) for results in zip(*rows, strict=True)]


def scan(step: Callable[..., Any], init: Any, columns: Any, unchanged: Any = ()) -> Any:
    """Call a graph for each row of some tensors, handing values on from row to row."""
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


def resolve(name: str) -> Callable[..., Any]:
    """Find an operator by the name in a payload.

    Raises:
        InputError: No such operator is registered in this process.
    """
    for table in (HIGHER_ORDER, EDGE, PYTHON):
        if name in table:
            return table[name]
    for library in ("", *_LIBRARIES.get(name.partition(".")[0], ())):
        if library:
            importlib.import_module(library)
        found: Any = torch.ops
        for part in name.split("."):
            found = getattr(found, part, None)
        if isinstance(found, _OVERLOAD):  # and nothing else that a name may lead to
            return found
    raise InputError(
        f"Operator {name} is not registered in this process. Import the library that defines it before loading the "
        f"file; with torch {torch.__version__}, an operator of torch itself that is missing was removed or renamed."
    )
