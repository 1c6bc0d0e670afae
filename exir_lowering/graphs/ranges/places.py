"""Where the elements of a row come from, in operators that move elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.fx import Node

from exir_lowering._upstream.ambient import neutral
from exir_lowering._upstream.fakes import expression
from exir_lowering.graphs.ranges.transfers import dim_of, name_of, rank_of, shape_of

if TYPE_CHECKING:
    from exir_lowering.graphs.ranges.analysis import ValueRanges

_Counts: TypeAlias = "Mapping[Node, Mapping[int, Any]]"

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


def sources(ranges: ValueRanges, node: Node, dim: int, counts: _Counts | None = None) -> Sources | None:
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
        place = -1 if _counted(node, origin, dim, counts or {}) else _indexed(ranges, node, origin, dim)
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
    """Return the dimension of a reshaped value that became a dimension, with as many elements behind it."""
    if not all(type(size) is int for size in (*shape, *origin)):
        return _viewed_symbols(shape, origin, dim)
    behind = math.prod(shape[len(shape) + dim + 1 :])
    for place in range(-1, -len(origin) - 1, -1):
        if math.prod(origin[len(origin) + place + 1 :]) == behind and origin[place] == shape[dim]:
            return place
    return None


def _viewed_symbols(shape: Sequence[Any], origin: Sequence[Any], dim: int) -> int | None:
    """The same where sizes are symbols: only dimensions of size 1 may come or go behind the row, and in it nothing."""
    behind = [str(size) for size in shape[len(shape) + dim + 1 :] if str(size) != "1"]
    for place in range(-1, -len(origin) - 1, -1):
        other = [str(size) for size in origin[len(origin) + place + 1 :] if str(size) != "1"]
        if str(origin[place]) == str(shape[dim]) and other == behind:
            return place
    return None


def _counted(node: Node, origin: Sequence[Any], dim: int, counts: _Counts) -> bool:
    """Return whether indices pick, for each row, a row along the last dimension as it is, whose size is a symbol."""
    indices: Any = node.args[1]
    if len(indices) != len(origin) or None in indices:
        return False
    *others, last = indices
    if any(len(shape := shape_of(each) or ()) >= -dim and not _same(shape[dim], 1) for each in others):
        return False
    return bool(counts.get(last, {}).get(rank_of(last) + dim) == expression(origin[-1]))


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
