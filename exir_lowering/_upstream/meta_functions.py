"""What torch's operators compute on tensors without memory, without importing torch's compiler for it.

Many are Python functions that torch's compiler must not trace. The first call of each imports the compiler to tell it
so, which takes as long as importing torch, and is not needed if nothing else has imported it. Likewise, each check of a
shape imports sympy, in case the shape is symbolic.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch

# The module where the functions are registered, and the wrapper of those that the compiler must not trace.
from torch import _compile
from torch._decomp import global_decomposition_table

from exir_lowering._upstream import pins
from exir_lowering._upstream.locks import Change, Shared

_MARK = "__dynamo_disable"  # where the wrapper keeps what it calls instead of the function


@lru_cache(maxsize=1)
def _left_alone() -> tuple[FunctionType, ...]:
    """Return the functions that the compiler must not trace; none if this torch wraps them in another way."""
    wrapper = _compile._disable_dynamo(lambda: None).__code__
    if "fn" not in wrapper.co_freevars or _MARK not in wrapper.co_consts:
        return ()
    found: dict[FunctionType, None] = {}
    seen: set[FunctionType] = set()
    left: list[Any] = [function for table in global_decomposition_table.values() for function in table.values()]
    while left:
        function = left.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        cells = [_content(cell) for cell in function.__closure__ or ()]
        left += cells
        if function.__code__ is wrapper:
            wrapped = cells[wrapper.co_freevars.index("fn")]
            if isinstance(wrapped, FunctionType):
                found[wrapped] = None
    return tuple(found)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _marking() -> tuple[Change, Change]:
    if "torch._dynamo" in sys.modules or not pins.is_on("operators without torch's compiler"):
        return (lambda: None), (lambda: None)
    check = torch._check_with

    def check_with(error_type: Any, condition: Any, message: Any) -> Any:
        return None if condition is True else check(error_type, condition, message)

    marked = [function for function in _left_alone() if not hasattr(function, _MARK)]

    def mark() -> None:
        for function in marked:
            setattr(function, _MARK, function)
        setattr(torch, "_check_with", check_with)  # noqa: B010  # a function of another type

    def unmark() -> None:
        if torch._check_with is check_with:
            setattr(torch, "_check_with", check)  # noqa: B010
        for function in marked:
            if getattr(function, _MARK, None) is function:
                delattr(function, _MARK)

    return mark, unmark


WITHOUT_COMPILER = Shared(_marking)
"""A context in which operators on tensors without memory import neither torch's compiler nor sympy."""
