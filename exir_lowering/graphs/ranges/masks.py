"""Whether rows of scores can be masked entirely.

Of numbers: what is the largest that every row reaches with one element, or holds a NaN? Of truth values: does every row
hold a given one? The questions go from a value to its sources. Dimensions are counted from the last one (-1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from exir_lowering._upstream.ambient import neutral
from exir_lowering.graphs.operators.names import argument
from exir_lowering.graphs.ranges import doubts
from exir_lowering.graphs.ranges.intervals import INF, Doubt, limits
from exir_lowering.graphs.ranges.nodes import MOVEMENTS, VIEWS, dtype_of, name_of, shape_of

if TYPE_CHECKING:
    from exir_lowering.graphs.ranges.analysis import ValueRanges


class Rows:
    """Answers about the rows of the values of a graph."""

    def __init__(self, ranges: ValueRanges) -> None:
        self._ranges = ranges
        self._reached: dict[tuple[Node, int, bool | None], float | Doubt] = {}

    def doubt(self, node: Node, dim: int) -> Doubt | None:
        """Return None if every row along `dim` (of floats) has an element that is not -inf, or none; else the doubt."""
        shape = shape_of(node)
        if shape is None:
            return doubts.masked(self._ranges, node, "-inf")
        try:
            found = self._reach(node, dim % len(shape) - len(shape) if shape else -1)
        except RecursionError:
            return doubts.masked(self._ranges, node, "-inf")
        if not isinstance(found, Doubt):
            return None
        # What is no mask is in doubt since it is not bounded: an input or a buffer, which can be, may be the cause.
        cause = doubts.unbounded(self._ranges, found.node)
        known = self._ranges.is_input(cause.node) or self._ranges.state_name(cause.node) is not None
        return cause if found.advice == doubts.NOTHING and known else found

    def _reach(self, node: Any, dim: int, truth: bool | None = None) -> float | Doubt:
        """Return a number that every row reaches with an element, any for a `truth`; or why there is none."""
        low = self._low(node) if truth is None else 1.0 if self._always(node, truth) else -INF
        if low > -INF:
            return low
        key = (node, dim, truth)
        if key not in self._reached:
            shape, dtype = shape_of(node), dtype_of(node)
            # An element that is broadcast along the rows is a row of its own.
            known = shape is not None and len(shape) >= -dim
            known = known and (truth is not None or (dtype is not None and dtype.is_floating_point))
            found = self._find(node, dim, truth) if known else None
            what = "-inf" if truth is None else str(not truth)
            self._reached[key] = doubts.masked(self._ranges, node, what) if found is None else found
        return self._reached[key]

    def _find(self, node: Node, dim: int, truth: bool | None) -> float | Doubt | None:
        """Answer as `_reach` does; None if nothing is known."""
        dtype, numbers = dtype_of(node), truth is None
        floating = dtype is not None and dtype.is_floating_point
        if self._ranges.assumed(node) == "finite_rows" and dim == -1 and truth is not False and floating is numbers:
            return -limits(dtype)[0] if floating and dtype is not None else 1.0
        content = self._ranges.constant(node)
        if content is not None:
            with neutral():  # the smallest of the largest elements of the rows; NaN counts as large
                rows = torch.where((content != 0) == truth, 1.0, -INF) if truth is not None else content
                rows = rows.nan_to_num(INF, INF, -INF)
                least = float(rows.amax(dim).min()) if content.numel() else 0.0
            what = "-inf" if numbers else str(not truth)
            return least if least > -INF else doubts.masked(self._ranges, node, what, known=True)
        name = name_of(node).removeprefix("aten.")
        if truth is None and name in ("add.Tensor", "add.Scalar") and argument(node, "alpha") in (None, 1):
            return self._floor_of_sum(node, dim)
        if truth is None and name == "where.self":
            return self._floor_of_choice(node, dim)
        if truth is not None and name in ("eq.Scalar", "ne.Scalar") and node.args[1] == 0:
            return self._reach(node.args[0], dim, truth is (name == "ne.Scalar"))
        if truth is not None and dtype is torch.bool and name in ("logical_not.default", "bitwise_not.default"):
            source = node.args[0]  # ~1 is -2, which is true: both are of truth values
            if name == "logical_not.default" or dtype_of(source) is torch.bool:
                return self._reach(source, dim, not truth)
        if truth and dtype is torch.bool and name in ("bitwise_and.Tensor", "logical_and.default"):
            # One side is true everywhere, the other one in each row.
            sides = (node.args[:2], node.args[1::-1])
            return next((self._reach(one, dim, True) for one, other in sides if self._always(other, True)), None)
        place = self._source(node, dim)
        if place is None:
            return None
        if truth is not None:  # what is not zero stays so
            same = dtype is dtype_of(place[0]) or torch.bool in (dtype, dtype_of(place[0]))
            return self._reach(*place, truth) if same else None
        found = self._reach(*place)
        return found if isinstance(found, Doubt) or dtype is None or found >= -limits(dtype)[0] else None

    def _floor_of_sum(self, node: Node, dim: int) -> float | Doubt:
        """One addend is bounded below everywhere, and each row of the other one reaches some number."""
        doubt: Doubt | None = None
        for one, other in (node.args[:2], node.args[1::-1]):
            low = self._low(other)
            floor = self._reach(one, dim) if low > -INF and isinstance(one, Node) else -INF
            if isinstance(floor, Doubt):
                doubt = doubt or floor
            elif (found := _rounded_sum(floor, low, dtype_of(node))) > -INF:
                return found
        culprits = [each for each in node.args if isinstance(each, Node) and self._low(each) == -INF]
        return doubt or doubts.unbounded(self._ranges, culprits[0] if culprits else node)

    def _floor_of_choice(self, node: Node, dim: int) -> float | Doubt | None:
        """Each row chooses, at least once, an element of a value that is bounded below."""
        condition, *values = node.args
        doubt: Doubt | None = None
        for value, truth in zip(values, (True, False), strict=True):
            low = self._low(value)
            if low > -INF:
                found = self._reach(condition, dim, truth)
                if not isinstance(found, Doubt):
                    return low
                doubt = doubt or found
        return doubt

    def _low(self, argument: Any) -> float:
        return self._ranges.of(argument).low if isinstance(argument, Node) else float(argument)

    def _always(self, node: Any, truth: bool) -> bool:
        """Return whether all elements of a value are known to be true, or all to be false."""
        number = self._ranges.uniform(node)
        if number is not None:
            return bool(number) is truth
        if truth and dtype_of(node) is torch.bool and self._ranges.of(node).low >= 1:
            return True
        content = self._ranges.constant(node) if dtype_of(node) is torch.bool else None
        return content is not None and bool((content if truth else ~content).all())

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _source(self, node: Node, dim: int) -> tuple[Node, int] | None:
        """Return the value, and its dimension, of whose rows those of a value consist; None if that is not known."""
        name, shape = name_of(node), shape_of(node)
        source: Any = node.args[0] if node.args else None
        origin = shape_of(source)
        if shape is None or origin is None or name not in (*MOVEMENTS, "aten.index.Tensor"):
            return None
        place: int | None = dim
        if name == "aten.expand_copy.default":
            place = dim if len(origin) >= -dim else None  # an element that is repeated is a separate row
        elif name == "aten.permute_copy.default":
            dims: Any = node.args[1]
            place = dims[dim] % len(origin) - len(origin)
        elif name in VIEWS:
            place = _viewed(shape, origin, dim)
        elif name == "aten.slice_copy.Tensor":
            cut = (argument(node, "dim") or 0) % len(origin) - len(origin)
            place = dim if cut != dim or (type(shape[dim]) is int and shape[dim] == origin[dim]) else None
        elif name == "aten.select_copy.int":
            before, cut = len(shape) + dim, int(argument(node, "dim")) % len(origin)
            place = (before if before < cut else before + 1) - len(origin)
        elif name == "aten.index.Tensor":
            place = self._indexed(node, origin, dim)
        return (source, place) if place is not None else None

    def _indexed(self, node: Node, origin: Sequence[Any], dim: int) -> int | None:
        """Return -1 if known indices pick, for each row, all elements of a row along the last dimension."""
        indices: Any = node.args[1]
        if len(indices) != len(origin) or type(origin[-1]) is not int or origin[-1] == 0:
            return None
        known = [self._ranges.constant(each) for each in indices if isinstance(each, Node)]
        tensors = [each for each in known if each is not None and each.dtype in (torch.int64, torch.int32)]
        if len(tensors) != len(indices):
            return None
        with neutral():
            *others, last = torch.broadcast_tensors(*tensors)  # type: ignore[no-untyped-call]
            if last.dim() < -dim or last.size(dim) != origin[-1] or last.numel() == 0:
                return None
            every = bool((last.movedim(dim, -1).sort(-1).values == torch.arange(origin[-1])).all())
            return -1 if every and all(bool((each == each.narrow(dim, 0, 1)).all()) for each in others) else None


def _viewed(shape: Sequence[Any], origin: Sequence[Any], dim: int) -> int | None:
    """Return the dimension of a reshaped value that became a dimension, with as many elements behind it if known."""
    fixed = all(type(size) is int for size in (*shape, *origin))

    def behind(sizes: Sequence[Any], place: int) -> Any:
        rest = sizes[len(sizes) + place + 1 :]
        return math.prod(rest) if fixed else [str(size) for size in rest if str(size) != "1"]

    for place in range(-1, -len(origin) - 1, -1):
        if str(origin[place]) == str(shape[dim]) and behind(origin, place) == behind(shape, dim):
            return place
    return None


def _rounded_sum(floor: float, low: float, dtype: torch.dtype | None) -> float:
    """Return what a sum of numbers from two bounds on is at least when it is rounded; -inf if it can overflow."""
    if dtype is None or not dtype.is_floating_point:
        return -INF
    largest, _, precision = limits(dtype)
    found = floor + low
    if found <= -largest:
        unit = largest * precision / (2 - precision)  # between the largest number and the one before
        return -largest if found > -largest - unit / 4 and low > -unit / 4 else -INF
    found -= 8 * precision * (abs(floor) + abs(low))
    return found if found >= -largest else -INF
