"""Rules for what orders elements, by how many come before each, and for what reads and writes them by index."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from exir_lowering.steps.legalizing.registry import require, require_small, rules


def _along(x: Tensor, dim: int, function: Callable[[Tensor], Any], keepdim: bool = True) -> Any:
    """Return what a function computes with a dimension moved to the end; a tensor without dimensions gets one."""
    if x.dim() == 0:
        return tuple(one.reshape(()) for one in function(x.reshape(1)))
    found = function(x.movedim(dim, -1).contiguous())
    return tuple(one.movedim(-1, dim) if keepdim else one.squeeze(-1) for one in found)


def _sorted(x: Tensor, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Return the values in their order, stable with NaN last, and their places."""
    require_small(*x.shape, x.shape[-1])
    one, other, place = x.unsqueeze(-1), x.unsqueeze(-2), torch.arange(x.shape[-1])
    before, same = other > one if descending else other < one, other == one
    if x.is_floating_point():
        first, second = (other != other, one != one) if descending else (one != one, other != other)
        before, same = before | (first & ~second), same | (first & second)
    rank = (before | (same & (place.unsqueeze(-1) > place))).sum(-1)
    places = torch.zeros_like(rank).scatter(-1, rank, place.expand(rank.shape).contiguous())
    return x.gather(-1, places), places


def _some(part: slice, rows: Tensor, descending: bool = False) -> Any:
    return (one[..., part] for one in _sorted(rows, descending))


def _middle(skip_nan: bool, x: Tensor, dim: int = -1, keepdim: bool = False) -> Any:
    def choose(rows: Tensor) -> Any:
        values, places = _sorted(rows)
        last = (values == values).sum(-1, keepdim=True) - 1
        middle = torch.div(torch.clamp(last, min=0), 2, rounding_mode="floor")
        if not skip_nan and x.is_floating_point():  # the first NaN, if there is one
            middle = torch.where(last + 1 < values.shape[-1], last + 1, middle)
        return values.gather(-1, middle), places.gather(-1, middle)

    return _along(x, dim, choose, keepdim)


def _most_frequent(rows: Tensor) -> tuple[Tensor, Tensor]:
    values, places = _sorted(rows)
    count = torch.clamp((values.unsqueeze(-1) == values.unsqueeze(-2)).sum(-1), min=1)  # a NaN equals nothing
    first = (count == count.amax(-1, keepdim=True)).to(torch.int64).argmax(-1, keepdim=True)
    last = first + count.gather(-1, first) - 1
    return values.gather(-1, first), places.gather(-1, last)


def _so_far(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of some rows, and which element of a row counts at which place."""
    require_small(*rows.shape, rows.shape[-1])
    place = torch.arange(rows.shape[-1])
    return place, place.unsqueeze(-1) >= place


def _running(extreme: str, x: Tensor, dim: int) -> Any:
    """Return the largest or smallest of what comes so far, NaN before all, and its last place."""

    def choose(rows: Tensor) -> Any:
        place, seen = _so_far(rows)
        given = rows.unsqueeze(-2)
        other = torch.where(seen, given, rows.unsqueeze(-1))  # its own value for what comes later
        best = getattr(other, extreme)(-1, keepdim=True)
        equal = given == best
        if x.is_floating_point():
            equal = equal | ((given != given) & (best != best))
        return best.squeeze(-1), torch.where(seen & equal, place, -1).amax(-1)

    return _along(x, dim, choose)


def _logcumsumexp(x: Tensor, dim: int) -> Any:
    def add(rows: Tensor) -> Any:
        return (torch.logsumexp(torch.where(_so_far(rows)[1], rows.unsqueeze(-2), -math.inf), -1),)

    return _along(x, dim, add)[0]


def _searchsorted(
    ordered: Tensor, values: Any, *, out_int32: bool = False, right: bool = False, side: Any = None, sorter: Any = None
) -> Any:
    ordered = ordered if sorter is None else ordered.gather(-1, sorter)
    values = values if isinstance(values, Tensor) else torch.full((), values, dtype=ordered.dtype)
    dtype = torch.promote_types(ordered.dtype, values.dtype)
    ordered, given = ordered.to(dtype), values.to(dtype).unsqueeze(-1)
    require_small(*values.shape, ordered.shape[-1])
    ordered = ordered.unsqueeze(-2) if ordered.dim() > 1 else ordered
    before = ~(ordered > given) if right or side == "right" else ~(ordered >= given)
    return before.sum(-1).to(torch.int32 if out_int32 else torch.int64)


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    require_small(x.numel(), bins)
    flat = x.reshape(-1)
    if min == max:
        require(x.numel() != 0)
        low, high = flat.amin(), flat.amax()
        low, high = torch.where(low == high, low - 1, low), torch.where(low == high, high + 1, high)
    else:
        low, high = torch.full((), min, dtype=x.dtype), torch.full((), max, dtype=x.dtype)
    inside = (flat >= low) & (flat <= high)
    place = (torch.where(inside, flat, low) - low) * bins / (high - low)
    place = torch.clamp(place.to(torch.int64), max=bins - 1)
    return ((place.unsqueeze(-1) == torch.arange(bins)) & inside.unsqueeze(-1)).sum(0).to(x.dtype)


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    places = torch.where(index < 0, index + x.numel(), index).to(torch.int64).reshape(-1)
    put = x.reshape(-1).scatter_add if accumulate else x.reshape(-1).scatter
    return put(0, places, source.reshape(-1)).reshape(x.shape)


def _written(view: Callable[..., Tensor], x: Tensor, src: Tensor, *args: Any) -> Tensor:
    """Write where a view of all places is."""
    require(x.is_contiguous())
    places = view(torch.arange(x.numel()).reshape(x.shape), *args)
    return x.reshape(-1).scatter(0, places.reshape(-1), src.to(x.dtype).reshape(-1)).reshape(x.shape)


def _scatter_reduce(x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True) -> Any:
    if x.dtype is torch.bool or x.dim() == 0:
        kind = torch.int64 if x.dtype is torch.bool else x.dtype
        whole, places, given = (one.reshape(one.shape or (1,)) for one in (x.to(kind), index, src.to(kind)))
        found = _scatter_reduce(whole, dim, places, given, reduce, include_self=include_self)
        return found.reshape(x.shape).to(x.dtype)
    if 0 in index.shape:
        return x.clone()
    dim, index, size = dim % x.dim(), index.to(torch.int64), x.shape[dim]
    for other in range(x.dim()):
        src = src.narrow(other, 0, index.shape[other])
    counts = torch.zeros(x.shape, dtype=torch.int64).scatter_add(dim, index, torch.ones_like(index))
    if reduce in ("sum", "mean"):
        found = (x if include_self else torch.where(counts > 0, 0, x)).scatter_add(dim, index, src)
        if reduce == "mean":
            counts = torch.clamp(counts + 1 if include_self else counts, min=1)
            exact = x.is_floating_point()
            found = found / counts.to(x.dtype) if exact else torch.div(found, counts, rounding_mode="floor")
        return found
    require_small(*index.shape, size)
    mask = index.movedim(dim, -1).unsqueeze(-2) == torch.arange(size).unsqueeze(-1)
    info: Any = None if x.is_floating_point() else torch.iinfo(x.dtype)
    neutral = {"prod": 1, "amax": info.min if info else -math.inf, "amin": info.max if info else math.inf}[reduce]
    values = torch.where(mask, src.movedim(dim, -1).unsqueeze(-2), torch.full((), neutral, dtype=x.dtype))
    found = values.prod(-1, dtype=x.dtype) if reduce == "prod" else getattr(values, reduce)(-1)
    found = found.movedim(-1, dim)
    if padded := found.shape != x.shape:
        missing = [(0, whole - part) for whole, part in zip(x.shape, found.shape, strict=True)]
        found = torch.constant_pad_nd(found, [each for pair in reversed(missing) for each in pair])
    join = {"prod": torch.mul, "amax": torch.maximum, "amin": torch.minimum}[reduce]
    found = join(found, x) if include_self else found
    return torch.where(counts > 0, found, x) if padded or not include_self else found


def _scatter_joined(x: Tensor, dim: int, index: Tensor, src: Any, *, reduce: str) -> Any:
    src = src if isinstance(src, Tensor) else torch.full(index.shape, src, dtype=x.dtype)
    return _scatter_reduce(x, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce])


def _index_reduce(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True) -> Any:
    if x.dim() > 0:
        index = index.reshape([-1 if other == dim % x.dim() else 1 for other in range(x.dim())])
        index = index.expand(source.shape).contiguous()
    return _scatter_reduce(x, dim, index, source, reduce, include_self=include_self)


def _embedding_bag(weight: Tensor, indices: Tensor, offsets: Tensor, *given: Any) -> Any:
    """Return sums, means or maxima of rows by bag; what is left out is in one more bag."""
    defaults: Any = (False, 0, False, None, False, -1)
    _, mode, _, weights, last, padding = given + defaults[len(given) :]
    count, width, bags = indices.shape[0], weight.shape[1], offsets.shape[0] - last
    require_small(count, offsets.shape[0])
    indices, offsets, place = indices.to(torch.int64), offsets.to(torch.int64), torch.arange(count)
    bag = (offsets[:bags] <= place.unsqueeze(-1)).sum(-1) - 1
    bag = torch.where(indices == padding, bags, bag) if padding >= 0 else bag
    bag = torch.where(place < offsets[-1], bag, bags) if last else bag
    rows = torch.index_select(weight, 0, indices)
    rows = rows if weights is None else rows * weights.unsqueeze(-1)
    wide, none = bag.unsqueeze(-1).expand(count, width).contiguous(), torch.zeros(bags + 1, width, dtype=rows.dtype)
    found = _scatter_reduce(none, 0, wide, rows, ("sum", "mean", "amax")[mode], include_self=False)
    return found[:bags], None, None, None


rules(
    {
        "sort": lambda x, dim=-1, descending=False: _along(x, dim, partial(_sorted, descending=descending)),
        "sort.stable": lambda x, *, stable, dim=-1, **given: _along(x, dim, partial(_sorted, **given)),
        "topk": lambda x, k, dim=-1, largest=True, _=True: _along(x, dim, partial(_some, slice(k), descending=largest)),
        "kthvalue": lambda x, k, dim=-1, keepdim=False: _along(x, dim, partial(_some, slice(k - 1, k)), keepdim),
        "median.dim": partial(_middle, False),
        "nanmedian.dim": partial(_middle, True),
        "median": lambda x: _middle(False, x.reshape(-1))[0],
        "nanmedian": lambda x: _middle(True, x.reshape(-1))[0],
        "mode": lambda x, dim=-1, keepdim=False: _along(x, dim, _most_frequent, keepdim),
        "cummax": partial(_running, "amax"),
        "cummin": partial(_running, "amin"),
        "searchsorted.Tensor searchsorted.Scalar": _searchsorted,
        "bucketize.Tensor bucketize.Scalar": lambda values, ordered, **given: _searchsorted(ordered, values, **given),
        "histc": _histc,
        "put": _put,
        "diagonal_scatter": partial(_written, torch.diagonal),
        "as_strided_scatter": partial(_written, torch.as_strided),
        "scatter.reduce scatter.value_reduce": _scatter_joined,
    }
)
rules(
    {
        "logcumsumexp": _logcumsumexp,
        "scatter_reduce.two": _scatter_reduce,
        "index_reduce": _index_reduce,
        "_embedding_bag _embedding_bag_forward_only": _embedding_bag,
    },
    wide=torch.float32,
)
