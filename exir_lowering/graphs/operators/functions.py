"""The closed lists of what a file may call besides operators: functions of numbers, and operators that call graphs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch


def split_words(text: str) -> frozenset[str]:
    """Return the words of a text, as a closed list."""
    return frozenset(text.split())


_OPERATORS = """
    abs add and_ eq floordiv ge getitem gt invert le lshift lt mod mul ne neg not_ or_ pos pow rshift sub truediv xor
"""
_OF_TORCH = "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum"

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in _OPERATORS.split()},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "sqrt", "trunc")},
    **{f"torch.{name}": getattr(torch, name) for name in _OF_TORCH.split()},
    **{function.__name__: function for function in (max, min, round)},
}
"""What exported graphs call on sizes and on lists of results; what has no dot is Python's, most of it in `operator`."""

HIGHER_ORDER = split_words(
    """
    associative_scan auto_functionalized auto_functionalized_v2 cond hints_wrapper invoke_subgraph map_impl out_dtype
    scan strict_mode tag_activation_checkpoint while_loop while_loop_stack_output wrap wrap_activation_checkpoint
    wrap_with_autocast wrap_with_set_grad_enabled
    """
)
"""Operators that call graphs, and whose arguments say all; others look up what this process has recorded."""

REFUSED = frozenset(("aten::from_file", "aten::_print", "aten::_test_string_default", "aten::_test_ambiguous_defaults"))
"""ATen's operators that do more than compute, by name without overload; compilers execute operators on constants."""

_NUMBERS = (bool, int, float)
_LARGEST_SHIFT = 63


def find_function(name: str) -> Callable[..., Any] | None:
    """Return a function of the list that is safe to call with anything; None if it is not on the list."""
    if name == "getitem":
        return _getitem
    return _of_numbers(name) if name in FUNCTIONS else None


def _of_numbers(name: str) -> Callable[..., Any]:
    """Return a Python function that only takes numbers: with other types it could do more, such as repeat a text."""
    function = FUNCTIONS[name]

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
