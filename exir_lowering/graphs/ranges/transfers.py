"""Calls of operators, as transfer functions see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from exir_lowering.graphs.operators.names import target_name
from exir_lowering.graphs.ranges.intervals import TOP, Range, convert, point, settle

Result: TypeAlias = "Range | tuple[Range, ...]"
Transfer: TypeAlias = "Callable[[Call], Result]"

_TRANSFERS: dict[str, tuple[Transfer, bool]] = {}

_MOST = float(2**48)
"""No tensor has more elements."""


def dtype_of(node: Any) -> torch.dtype | None:
    """Return the type of the elements of a node's value, None if it is no tensor or not known."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """Return the sizes of a node's value, None if it is no tensor or not known."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def upper(size: Any) -> float:
    """Return a number that a size does not exceed."""
    if isinstance(size, int):
        return float(size)
    if isinstance(size, torch.SymInt):
        try:
            number = float(size.node.shape_env.bound_sympy(size.node.expr).upper)
        except (AttributeError, TypeError, ValueError, OverflowError):
            return _MOST
        return min(number, _MOST) if number == number else _MOST
    return _MOST


def product(sizes: Iterable[Any]) -> float:
    """Return a number that the product of some sizes does not exceed."""
    number = 1.0
    for size in sizes:
        number *= upper(size)
    return min(number, _MOST)


class Call:
    """A call of an operator whose inputs have been analysed."""

    __slots__ = ("dtype", "lookup", "node", "related")

    def __init__(self, node: Node, lookup: Callable[[Node], Range], *, related: bool = True) -> None:
        self.node, self.lookup = node, lookup
        self.related = related  # whether the ranges are of all elements, so that they depend on each other as values do
        self.dtype = dtype_of(node)  # None if it is not known, or there are several results

    def get(self, position: int, name: str = "", default: Any = None) -> Any:
        """Return an argument."""
        if position < len(self.node.args):
            return self.node.args[position]
        return self.node.kwargs.get(name, default)

    def range(self, argument: Any) -> Range:
        """Return the range of an argument as it is."""
        if isinstance(argument, Node):
            return self.lookup(argument)
        if isinstance(argument, (bool, int, float)):
            try:
                return point(argument)
            except OverflowError:
                return TOP
        return TOP

    def operand(self, position: int, name: str = "", dtype: torch.dtype | None = None) -> Range:
        """Return the range of an argument after its conversion to the type of the result, or to a given one."""
        return self.converted(self.get(position, name), dtype or self.dtype)

    def converted(self, argument: Any, dtype: torch.dtype | None) -> Range:
        """Return the range of an argument after its conversion to a type."""
        found = self.range(argument)
        if isinstance(argument, Node):
            return convert(found, dtype_of(argument), dtype)
        return settle(found, dtype)

    def shape(self, position: int, name: str = "") -> tuple[Any, ...] | None:
        """Return the sizes of an argument, None if they are not known."""
        return shape_of(self.get(position, name))


def rounds(*names: str) -> Callable[[Transfer], Transfer]:
    """Register the transfer function of operators whose results are rounded."""
    return _register(names, True)


def keeps(*names: str) -> Callable[[Transfer], Transfer]:
    """Register the transfer function of operators whose result has elements of their arguments, or settled ranges."""
    return _register(names, False)


def _register(names: Iterable[str], rounded: bool) -> Callable[[Transfer], Transfer]:
    def register(function: Transfer) -> Transfer:
        for name in names:
            _TRANSFERS[name if "." in name.partition(".")[2] else f"{name}.default"] = (function, rounded)
        return function

    return register


@lru_cache(maxsize=4096)
def transfer_of(target: Any) -> tuple[Transfer, bool] | None:
    """Return the transfer function of an operator, and whether its result is to be rounded; None if it has none."""
    return _TRANSFERS.get(target_name(target))
