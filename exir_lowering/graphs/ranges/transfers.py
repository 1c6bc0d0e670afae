"""Calls of operators, as transfer functions see them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch.fx import Node

from exir_lowering.graphs.operators.names import argument, target_name
from exir_lowering.graphs.ranges.intervals import TOP, Range, convert, meet, point, settle, whole

Result: TypeAlias = "Range | tuple[Range, ...]"
Transfer: TypeAlias = "Callable[[Call], Result]"
Value = TypeVar("Value")

_TRANSFERS: dict[str, tuple[Transfer, bool]] = {}

_MOST = float(2**48)
"""No tensor has more elements."""

_MANY = 8
"""How many inputs a node asks for one by one, before all that it has are computed."""


def dtype_of(node: Any) -> torch.dtype | None:
    """Return the type of the elements of a node's value, None if it is no tensor or not known."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def name_of(node: Any) -> str:
    """Return the name of the operator that a node calls, such as "aten.add.Tensor"; "" if it calls none."""
    return target_name(node.target) if isinstance(node, Node) and node.op == "call_function" else ""


def rank_of(node: Any) -> int:
    """Return the number of dimensions of a node's value, 0 if it is no tensor or not known."""
    return len(shape_of(node) or ())


def dim_of(node: Node, operand: Any) -> int:
    """Return the dimension of an operand that a node passes as `dim`, counted from 0."""
    return int(argument(node, "dim") or 0) % max(1, rank_of(operand))


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """Return the sizes of a node's value, None if it is no tensor or not known."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _upper(size: Any) -> float:
    """Return a number that a size does not exceed."""
    if isinstance(size, int):
        return float(size)
    try:
        number = float(size.node.shape_env.bound_sympy(size.node.expr).upper)
    except (AttributeError, TypeError, ValueError, OverflowError):
        return _MOST
    return min(number, _MOST) if number == number else _MOST


def product(sizes: Iterable[Any]) -> float:
    """Return a number that the product of some sizes does not exceed."""
    number = 1.0
    for size in sizes:
        number *= _upper(size)
    return min(number, _MOST)


class NotYetError(Exception):
    """The range of an operand has to be found first."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.node = node


class Found(dict[Node, Value]):
    """What is found out about nodes; asking for what is not yet known raises a NotYetError."""

    def __missing__(self, node: Node) -> Value:
        raise NotYetError(node)

    def of(self, node: Node, compute: Callable[[Node], Value]) -> Value:
        """Return what is computed from that of other nodes, each once; only those are computed that are asked for."""
        stack, asked = [node], Counter[Node]()
        while stack:
            last = stack[-1]
            if last not in self:
                try:
                    self[last] = compute(last)
                except NotYetError as missing:
                    asked[last] += 1
                    if asked[last] == _MANY:  # one by one, a cat of n values would ask n times for up to n of them
                        stack += [each for each in reversed(last.all_input_nodes) if each not in self]
                    stack.append(missing.node)
                    continue
            stack.pop()
        return self[node]


class Call:
    """A call of an operator whose inputs have been analysed."""

    __slots__ = ("dtype", "lookup", "node")

    def __init__(self, node: Node, lookup: Callable[[Node], Range]) -> None:
        self.node, self.lookup = node, lookup
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
        try:
            return point(argument) if isinstance(argument, (bool, int, float)) else TOP
        except OverflowError:
            return TOP

    def operand(self, position: int, name: str = "") -> Range:
        """Return the range of an argument after its conversion to the type of the result."""
        return self.converted(self.get(position, name), self.dtype)

    def converted(self, argument: Any, dtype: torch.dtype | None) -> Range:
        """Return the range of an argument after its conversion to a type."""
        found = self.range(argument)
        if isinstance(argument, Node):
            return convert(found, dtype_of(argument), dtype)
        return settle(found, dtype)


def _register(rounded: bool, *names: str) -> Callable[[Transfer], Transfer]:
    def register(function: Transfer) -> Transfer:
        for name in names:
            _TRANSFERS[name if "." in name.partition(".")[2] else f"{name}.default"] = (function, rounded)
        return function

    return register


rounds = partial(_register, True)
"""Registers the transfer function of operators whose results are rounded."""

keeps = partial(_register, False)
"""Registers the transfer function of operators whose result has elements of their arguments, or settled ranges."""


def result_of(call: Call) -> Result | None:
    """Return the ranges of a call's results, None if there is no transfer function; all of their type if it fails."""
    transfer, rounded = _TRANSFERS.get(target_name(call.node.target), (None, False))
    if transfer is None:
        return None
    try:
        found = transfer(call)
        if not isinstance(found, Range):
            return found
        found = settle(found, call.dtype) if rounded else found
    except (NotYetError, MemoryError):
        raise
    except Exception:
        return whole(dtype_of(call.node))  # arguments that the operator does not take, or sizes that are not known
    return meet(found, whole(call.dtype)) if found.low == found.low and found.high == found.high else TOP
