"""Whether rows of scores can be masked entirely.

The question is asked in two forms. Of numbers: what is the largest number that every row reaches with one element, or
holds a NaN (`_floor`)? Of truth values: does every row hold a given one (`_holds`)? A row along a dimension of a value
that was broadcast, reshaped or permuted is a row along some dimension of its source, so the questions go from a value
to its sources. Dimensions are counted from the last one (-1), as broadcasting does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from exir_lowering._upstream.ambient import neutral
from exir_lowering.graphs.ranges import doubts
from exir_lowering.graphs.ranges.intervals import INF, Doubt, limits
from exir_lowering.graphs.ranges.transfers import dim_of, dtype_of, name_of, rank_of, shape_of

if TYPE_CHECKING:
    from exir_lowering.graphs.ranges.analysis import ValueRanges


_PLAIN = (
    "aten.clone.default", "dim_order_ops._clone_dim_order.default", "dim_order_ops._to_dim_order_copy.default",
    "aten._to_copy.default", "aten.alias_copy.default", "aten.to.dtype", "aten.detach_copy.default",
)  # fmt: skip
_VIEWS = (
    "aten.view_copy.default", "aten.unsqueeze_copy.default", "aten.squeeze_copy.default", "aten.squeeze_copy.dim",
    "aten.squeeze_copy.dims", "aten.view.default", "aten.unsqueeze.default", "aten.reshape.default",
    "aten._unsafe_view.default",
)  # fmt: skip
_EXPANSIONS = ("aten.expand_copy.default", "aten.expand.default")
_PERMUTATIONS = ("aten.permute_copy.default", "aten.permute.default")


@dataclass(frozen=True, slots=True)
class Sources:
    """Rows that the rows of a value are made of."""

    rows: tuple[tuple[Node, int], ...]  # values and dimensions, counted from the last one
    every: bool = True  # each row is a row of one of them: look at all; else it has all elements of a row of each


def find_sources(ranges: ValueRanges, node: Node, dim: int) -> Sources | None:
    """Return the rows that rows of a value along a dimension, counted from the last, consist of; None if not known."""
    name = name_of(node)
    shape = shape_of(node)
    source = node.args[0] if node.args else None
    if name == "aten.cat.default":
        return _pieces(node, dim)
    origin = shape_of(source)
    if shape is None or origin is None or not isinstance(source, Node) or len(shape) < -dim:
        return None
    place = None
    if name in _PLAIN:
        place = dim
    elif name in _EXPANSIONS:
        place = dim if len(origin) >= -dim else None  # an element that is repeated is a separate row
    elif name in _PERMUTATIONS:
        dims: Any = node.args[1]
        place = dims[dim] % len(origin) - len(origin)
    elif name in _VIEWS:
        place = _viewed(shape, origin, dim)
    elif name in ("aten.slice_copy.Tensor", "aten.slice.Tensor"):
        cut = dim_of(node, source) - len(origin)
        place = dim if cut != dim or _same(shape[dim], origin[dim]) else None
    elif name in ("aten.select_copy.int", "aten.select.int"):
        cut = dim_of(node, source)
        before = len(shape) + dim
        place = (before if before < cut else before + 1) - len(origin)
    elif name == "aten.index.Tensor":
        place = _indexed(ranges, node, origin, dim)
    return Sources(((source, place),)) if place is not None else None


def _same(one: Any, other: Any) -> bool:
    return type(one) is int and type(other) is int and one == other


def _pieces(node: Node, dim: int) -> Sources | None:
    """Along the dimension of a concatenation a row has rows of all pieces; along others it is a row of one of them."""
    tensors: Any = node.args[0]
    shape = shape_of(node)
    if not isinstance(tensors, (list, tuple)) or shape is None or not all(isinstance(each, Node) for each in tensors):
        return None
    if dim_of(node, node) - len(shape) != dim:
        return Sources(tuple((each, dim) for each in tensors))
    sizes = [(each, (shape_of(each) or ())[dim]) for each in tensors if rank_of(each) == len(shape)]
    rows = tuple((each, dim) for each, size in sizes if type(size) is int and size > 0)
    return Sources(rows, every=False) if rows else None


def _viewed(shape: Sequence[Any], origin: Sequence[Any], dim: int) -> int | None:
    """Return the dimension of a reshaped value that became a dimension, with as many elements behind it.

    Where sizes are symbols, only dimensions of size 1 may come or go behind it, and nothing in it.
    """
    fixed = all(type(size) is int for size in (*shape, *origin))

    def behind(sizes: Sequence[Any], place: int) -> Any:
        rest = sizes[len(sizes) + place + 1 :]
        return math.prod(rest) if fixed else [str(size) for size in rest if str(size) != "1"]

    for place in range(-1, -len(origin) - 1, -1):
        if str(origin[place]) == str(shape[dim]) and behind(origin, place) == behind(shape, dim):
            return place
    return None


def _indexed(ranges: ValueRanges, node: Node, origin: Sequence[Any], dim: int) -> int | None:
    """Return -1 if known indices pick, for each row, all elements of a row along the last dimension."""
    indices = node.args[1]
    if not isinstance(indices, (list, tuple)) or len(indices) != len(origin) or type(origin[-1]) is not int:
        return None
    known = [ranges.constant(each) if isinstance(each, Node) else None for each in indices]
    tensors = [each for each in known if each is not None and each.dtype in (torch.int64, torch.int32)]
    if len(tensors) != len(indices) or origin[-1] == 0:
        return None
    with neutral():
        *others, last = torch.broadcast_tensors(*tensors)  # type: ignore[no-untyped-call]
        if last.dim() < -dim or last.size(dim) != origin[-1] or last.numel() == 0:
            return None
        columns = last.movedim(dim, -1)
        if not bool((columns.sort(-1).values == torch.arange(origin[-1])).all()):
            return None
        if any(bool((each != each.narrow(dim, 0, 1)).any()) for each in others):
            return None
    return -1


_DEEPEST = 60
_FARTHEST = 200


class Rows:
    """Answers about the rows of the values of a graph."""

    def __init__(self, ranges: ValueRanges) -> None:
        self._ranges = ranges
        self._floors: dict[tuple[Node, int], float | Doubt] = {}
        self._truths: dict[tuple[Node, int, bool], Doubt | None] = {}

    def doubt(self, node: Node, dim: int) -> Doubt | None:
        """Return None if every row along `dim` (of floats) has an element that is not -inf, or none; else the doubt."""
        shape = shape_of(node)
        if shape is None:
            return doubts.masked(self._ranges, node, "-inf")
        found = self._floor(node, dim % len(shape) - len(shape) if shape else -1, 0)
        if not isinstance(found, Doubt):
            return None
        # What is no mask is in doubt since it is not bounded: an input or a buffer, which can be, may be the cause.
        cause = doubts.unbounded(self._ranges, found.node)
        known = self._ranges.is_input(cause.node) or self._ranges.state_name(cause.node) is not None
        return cause if found.advice == doubts.NOTHING and known else found

    def _floor(self, node: Any, dim: int, depth: int) -> float | Doubt:
        """Return a number greater than -inf that every row reaches with an element (or NaN), or why there is none."""
        if not isinstance(node, Node):
            return float(node)
        low = self._ranges.of(node).low
        if low > -INF:
            return low
        if depth > _DEEPEST:
            return doubts.too_deep(node)
        key = (node, dim)
        if key not in self._floors:
            self._floors[key] = self._find_floor(node, dim, depth + 1)
        return self._floors[key]

    def _find_floor(self, node: Node, dim: int, depth: int) -> float | Doubt:
        dtype, shape = dtype_of(node), shape_of(node)
        unclear = doubts.masked(self._ranges, node, "-inf")
        if dtype is None or shape is None or not dtype.is_floating_point or len(shape) < -dim:
            return unclear
        if self._ranges.assumed(node) == "finite_rows" and dim == -1:
            return -limits(dtype)[0]
        content = self._ranges.constant(node)
        if content is not None:
            return _floor_of(node, content, dim)
        name = name_of(node)
        if name in ("aten.add.Tensor", "aten.add.Scalar") and node.kwargs.get("alpha", 1) == 1 and len(node.args) == 2:
            return self._floor_of_sum(node, dim, depth)
        if name.startswith("aten.where."):
            return self._floor_of_choice(node, node.args, dim, depth)
        if name.startswith("aten.masked_fill.") and len(node.args) == 3:
            return self._floor_of_choice(node, (node.args[1], node.args[2], node.args[0]), dim, depth)
        if name in ("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar"):
            return self._floor_of_product(node, dim, depth, "div" in name)
        sources = find_sources(self._ranges, node, dim)
        if sources is None:
            return unclear
        floors = [self._floor(source, place, depth) for source, place in sources.rows]
        numbers = [floor for floor in floors if not isinstance(floor, Doubt)]
        if (sources.every and len(numbers) < len(floors)) or not numbers:
            return next(floor for floor in floors if isinstance(floor, Doubt))
        found = min(numbers) if sources.every else max(numbers)
        return found if _settled(found, dtype) > -INF else unclear

    def _floor_of_sum(self, node: Node, dim: int, depth: int) -> float | Doubt:
        """One addend is bounded below everywhere, and each row of the other one reaches some number."""
        doubt: Doubt | None = None
        found = -INF
        for one, other in (node.args, node.args[::-1]):
            low = self._low(other)
            if low == -INF:
                continue
            floor = self._operand_floor(one, dim, depth)
            if isinstance(floor, Doubt):
                doubt = doubt or floor
            else:
                found = max(found, _rounded_sum(floor, low, dtype_of(node)))
        if found > -INF:
            return found
        if doubt is not None:
            return doubt
        culprits = [each for each in node.args if isinstance(each, Node) and self._low(each) == -INF]
        return doubts.unbounded(self._ranges, culprits[0] if culprits else node)

    def _floor_of_choice(self, node: Node, args: Any, dim: int, depth: int) -> float | Doubt:
        """Each row chooses, at least once, an element of a value that is bounded below."""
        condition, one, other = args
        doubt: Doubt | None = None
        floors = []
        for value, truth in ((one, True), (other, False)):
            low = self._low(value)
            if low > -INF:
                found = self._operand_truth(condition, dim, truth, depth)
                if found is None:
                    floors.append(low)
                doubt = doubt or found
        return max(floors) if floors else doubt or doubts.masked(self._ranges, node, "-inf")

    def _floor_of_product(self, node: Node, dim: int, depth: int, divided: bool) -> float | Doubt:
        """Factors greater than zero and finite keep what is greater than -inf, unless it overflows."""
        one, other = node.args[:2]
        for value, factor in ((one, other),) if divided else ((one, other), (other, one)):
            low, high = self._low(factor), self._high(factor)
            if not isinstance(value, Node) or not 0 < low <= high < INF:
                continue
            floor = self._operand_floor(value, dim, depth)
            if isinstance(floor, Doubt):
                return floor
            found = min(floor / low, floor / high) if divided else min(floor * low, floor * high)
            found = _settled(1.02 * found if found < 0 else 0.0, dtype_of(node))
            if found > -INF:
                return found
        return doubts.masked(self._ranges, node, "-inf")

    def _operand_floor(self, operand: Any, dim: int, depth: int) -> float | Doubt:
        """Return the floor of an operand that is broadcast: an element that is repeated is a separate row."""
        if not isinstance(operand, Node) or rank_of(operand) >= -dim or self._low(operand) > -INF:
            return self._floor(operand, dim, depth)
        return doubts.masked(self._ranges, operand, "-inf")

    def _operand_truth(self, operand: Any, dim: int, truth: bool, depth: int) -> Doubt | None:
        """Return why no row of an operand that is broadcast may hold a truth value, None if each does."""
        if isinstance(operand, Node) and rank_of(operand) < -dim and not self._always(operand, truth):
            return doubts.masked(self._ranges, operand, str(not truth))
        return self._truth(operand, dim, truth, depth)

    def _low(self, argument: Any) -> float:
        return self._ranges.of(argument).low if isinstance(argument, Node) else float(argument)

    def _high(self, argument: Any) -> float:
        return self._ranges.of(argument).high if isinstance(argument, Node) else float(argument)

    def _always(self, node: Any, truth: bool) -> bool:
        """Return whether all elements of a value are known to be true, or all to be false."""
        if not isinstance(node, Node):
            return bool(node) is truth
        known = self._ranges.of(node)
        if (not known.has_zero and not known.nan) if truth else (known.low == known.high == 0 and not known.nan):
            return True
        content = self._ranges.constant(node) if dtype_of(node) is torch.bool else None
        return content is not None and bool((content if truth else ~content).all())

    def _truth(self, node: Any, dim: int, truth: bool, depth: int) -> Doubt | None:
        """Return None if every row that has elements holds a truth value, and otherwise why that is unclear."""
        if self._always(node, truth):
            return None
        if depth > _DEEPEST or not isinstance(node, Node):
            return doubts.too_deep(node)
        key = (node, dim, truth)
        if key not in self._truths:
            self._truths[key] = self._find_truth(node, dim, truth, depth + 1)
        return self._truths[key]

    def _find_truth(self, node: Node, dim: int, truth: bool, depth: int) -> Doubt | None:
        dtype, shape = dtype_of(node), shape_of(node)
        unclear = doubts.masked(self._ranges, node, "False" if truth else "True")
        if dtype is None or shape is None or len(shape) < -dim:
            return unclear
        if self._ranges.assumed(node) == "finite_rows" and dim == -1 and truth and not dtype.is_floating_point:
            return None
        content = self._ranges.constant(node)
        if content is not None:
            return None if _all_rows_hold(content, dim, truth) else doubts.constant_row(node, str(not truth))
        name = name_of(node)
        base = name.split(".")[1] if name.startswith("aten.") else ""
        if base in ("logical_not", "bitwise_not") or name in ("aten.eq.Scalar", "aten.ne.Scalar"):
            if node.args[1:] != (0,) if base in ("eq", "ne") else base == "bitwise_not" and dtype is not torch.bool:
                return unclear  # ~1 is -2, which is true
            return self._truth(node.args[0], dim, truth if base == "ne" else not truth, depth)
        junction = base.strip("_").rpartition("_")[2]  # "and" of logical_and, bitwise_and and __and__
        if junction in ("and", "or") and dtype is torch.bool:
            return self._truth_of_both(node, dim, truth, junction == "and", depth)
        if base in ("lt", "le", "gt", "ge"):
            return None if self._compares(node, dim, truth, base) else self._blame(node) or unclear
        sources = find_sources(self._ranges, node, dim)
        if sources is None or not _keeps_truth(node):
            return self._blame(node) or unclear
        found = [self._truth(source, place, truth, depth) for source, place in sources.rows]
        open_ = [each for each in found if each is not None]
        return (open_[0] if open_ else None) if sources.every or len(open_) == len(found) else None

    def _blame(self, node: Node) -> Doubt | None:
        """Blame the first input, or mutated buffer, that an operator makes a mask of."""
        if node.op != "call_function":
            return None
        found, seen = [node], {node}
        for each in found:  # grows
            if self._ranges.is_input(each) or self._ranges.state_name(each) is not None:
                return doubts.hidden(self._ranges, node, each)
            new = [n for n in each.all_input_nodes if n not in seen and len(found) < _FARTHEST]
            found += new
            seen.update(new)
        return None

    def _truth_of_both(self, node: Node, dim: int, truth: bool, both: bool, depth: int) -> Doubt | None:
        """True for a conjunction: one side is true everywhere, the other one in each row; False: either is in each."""
        one, other = node.args[:2]
        doubt: Doubt | None = None
        for here, there in ((one, other), (other, one)):
            if both is not truth or self._always(there, truth):
                found = self._operand_truth(here, dim, truth, depth)
                if found is None:
                    return None
                doubt = doubt or found
        return doubt or doubts.masked(self._ranges, node, str(not truth))

    def _compares(self, node: Node, dim: int, truth: bool, name: str) -> bool:
        """Return whether a comparison with known numbers has a result in each row: `kv <= q` where kv starts at 0."""
        one, other = node.args[:2]
        dtypes = {dtype_of(each) for each in (one, other) if isinstance(each, Node)}
        if len(dtypes) != 1 or any(dtype is None or dtype.is_floating_point for dtype in dtypes):
            return False
        if (name in ("gt", "ge")) is truth:  # from here on, whether one is less, or not greater: `strict`
            one, other = other, one
        least, most = self._extreme(one, dim, largest=False), self._extreme(other, dim, largest=True)
        strict = (name in ("lt", "gt")) is truth
        return any(a < b or (not strict and a == b) for a, b in ((least, self._low(other)), (self._high(one), most)))

    def _extreme(self, argument: Any, dim: int, *, largest: bool) -> float:
        """Return a number that each row of integers reaches: none has only greater, or only smaller, elements."""
        if not isinstance(argument, Node):
            return float(argument)
        content = self._ranges.constant(argument)
        if content is None or content.numel() == 0:
            return self._low(argument) if largest else self._high(argument)
        of_row, of_rows = (torch.amax, torch.amin) if largest else (torch.amin, torch.amax)
        with neutral():
            return float(of_rows(of_row(content, dim) if content.dim() >= -dim else content))


def _floor_of(node: Node, content: torch.Tensor, dim: int) -> float | Doubt:
    """Return the smallest of the largest elements of each row of a tensor; NaN counts as large."""
    if content.numel() == 0:
        return 0.0
    with neutral():
        rows = content if content.dim() == 0 else content.nan_to_num(INF, INF, -INF).amax(dim)
        found = float(rows.min())
    return found if found > -INF else doubts.constant_row(node, "-inf")


def _all_rows_hold(content: torch.Tensor, dim: int, truth: bool) -> bool:
    with neutral():
        return content.numel() == 0 or bool(((content != 0) if truth else (content == 0)).any(dim).all())


def _keeps_truth(node: Node) -> bool:
    """Return whether what is not zero in the first argument is not zero in the result, and the other way around."""
    source, target = dtype_of(node.all_input_nodes[0]), dtype_of(node)
    if source is None or target is None or source is target:
        return source is not None and source is target
    return torch.bool in (source, target) or (not source.is_floating_point and target.is_floating_point)


def _rounded_sum(floor: float, low: float, dtype: torch.dtype | None) -> float:
    """Return what a sum of numbers from two bounds on is at least, -inf if it can overflow to that.

    The lowest number of a type plus a small one rounds to the lowest number: masks are often made of it.
    """
    if dtype is None or not dtype.is_floating_point:
        return -INF
    largest, _, precision = limits(dtype)
    found = floor + low
    if found <= -largest:
        unit = largest * precision / (2 - precision)  # between the largest number and the one before
        return -largest if found > -largest - unit / 4 and low > -unit / 4 else -INF
    return _settled(found - 8 * precision * (abs(floor) + abs(low)), dtype)


def _settled(number: float, dtype: torch.dtype | None) -> float:
    """Return a bound of a type's numbers, -inf if it is beyond them."""
    return number if dtype is not None and dtype.is_floating_point and number >= -limits(dtype)[0] else -INF
