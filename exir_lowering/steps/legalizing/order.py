"""Rules for what orders elements, by comparing all pairs: an element's rank is how many come before it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from exir_lowering.steps.legalizing.registry import require, require_small, rule


def _nan(x: Tensor) -> Tensor:
    return x != x


def _at_end(x: Tensor, dim: int) -> Tensor:
    """Return a tensor with a dimension moved to the end; one without dimensions gets one."""
    return (x.unsqueeze(0) if x.dim() == 0 else x.movedim(dim, -1)).contiguous()


def _back(x: Tensor, dim: int, like: Tensor, keepdim: bool = True) -> Tensor:
    if like.dim() == 0:
        return x.reshape(())
    return x.movedim(-1, dim) if keepdim else x.squeeze(-1)


def _sorted(x: Tensor, dim: int, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Return the values in their order, stable with NaN last, and their places, with the dimension at the end."""
    x = _at_end(x, dim)
    require_small(*x.shape, x.shape[-1])
    one, other, place = x.unsqueeze(-1), x.unsqueeze(-2), torch.arange(x.shape[-1])
    before, same = other > one if descending else other < one, other == one
    if x.is_floating_point():
        first, second = (_nan(other), _nan(one)) if descending else (_nan(one), _nan(other))
        before, same = before | (first & ~second), same | (first & second)
    rank = (before | (same & (place.unsqueeze(-1) > place))).sum(-1)
    places = torch.zeros_like(rank).scatter(-1, rank, place.expand(rank.shape).contiguous())
    return x.gather(-1, places), places


@rule("sort")
def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> Any:
    return tuple(_back(one, dim, x) for one in _sorted(x, dim, descending))


@rule("sort.stable")
def _stable_sort(x: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Any:
    return _sort(x, dim, descending)


@rule("topk")
def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> Any:
    return tuple(_back(one[..., :k], dim, x) for one in _sorted(x, dim, largest))


@rule("kthvalue")
def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    return tuple(_back(one[..., k - 1 : k], dim, x, keepdim) for one in _sorted(x, dim))


def _middle(x: Tensor, dim: int = -1, keepdim: bool = False, *, skip_nan: bool) -> Any:
    values, places = _sorted(x, dim)
    last = (~_nan(values)).sum(-1, keepdim=True) - 1
    middle = torch.div(torch.clamp(last, min=0), 2, rounding_mode="floor")
    if not skip_nan and x.is_floating_point():  # the first NaN, if there is one
        middle = torch.where(last + 1 < values.shape[-1], last + 1, middle)
    return tuple(_back(one.gather(-1, middle), dim, x, keepdim) for one in (values, places))


def _middle_of_all(x: Tensor, *, skip_nan: bool) -> Any:
    return _middle(x.reshape(-1), skip_nan=skip_nan)[0]


for _name in ("median", "nanmedian"):
    rule(f"{_name}.dim")(partial(_middle, skip_nan=_name != "median"))
    rule(_name)(partial(_middle_of_all, skip_nan=_name != "median"))


@rule("mode")
def _mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> Any:
    values, places = _sorted(x, dim)
    same = values.unsqueeze(-1) == values.unsqueeze(-2)
    count = torch.clamp(same.sum(-1), min=1)  # a NaN equals nothing
    first = (count == count.amax(-1, keepdim=True)).to(torch.int64).argmax(-1, keepdim=True)
    last = first + count.gather(-1, first) - 1
    return _back(values.gather(-1, first), dim, x, keepdim), _back(places.gather(-1, last), dim, x, keepdim)


def _running(x: Tensor, dim: int, *, largest: bool) -> Any:
    """Return the largest or smallest of what comes so far, NaN before all, and its last place."""
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64)
    rows = _at_end(x, dim)
    require_small(*rows.shape, rows.shape[-1])
    place = torch.arange(rows.shape[-1])
    given, seen = rows.unsqueeze(-2), place.unsqueeze(-1) >= place
    other = torch.where(seen, given, rows.unsqueeze(-1))  # its own value for what comes later
    best = other.amax(-1, keepdim=True) if largest else other.amin(-1, keepdim=True)
    equal = (given == best) | (_nan(given) & _nan(best)) if x.is_floating_point() else given == best
    last = torch.where(seen & equal, place, -1).amax(-1)
    return _back(best.squeeze(-1), dim, x), _back(last, dim, x)


rule("cummax")(partial(_running, largest=True))
rule("cummin")(partial(_running, largest=False))


@rule("logcumsumexp", wide=torch.float32)
def _logcumsumexp(x: Tensor, dim: int) -> Any:
    if x.dim() == 0:
        return x.clone()
    rows = _at_end(x, dim)
    require_small(*rows.shape, rows.shape[-1])
    place = torch.arange(rows.shape[-1])
    seen = torch.where(place.unsqueeze(-1) >= place, rows.unsqueeze(-2), -math.inf)
    return _back(torch.logsumexp(seen, -1), dim, x)


@rule("searchsorted.Tensor", "searchsorted.Scalar")
def _searchsorted(
    ordered: Tensor,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Any:
    ordered = ordered if sorter is None else ordered.gather(-1, sorter)
    values = values if isinstance(values, Tensor) else torch.full((), values, dtype=ordered.dtype)
    dtype = torch.promote_types(ordered.dtype, values.dtype)
    ordered, given = ordered.to(dtype), values.to(dtype).unsqueeze(-1)
    require_small(*values.shape, ordered.shape[-1])
    ordered = ordered.unsqueeze(-2) if ordered.dim() > 1 else ordered
    before = ~(ordered > given) if right or side == "right" else ~(ordered >= given)
    return before.sum(-1).to(torch.int32 if out_int32 else torch.int64)


@rule("bucketize.Tensor", "bucketize.Scalar")
def _bucketize(values: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Any:
    return _searchsorted(boundaries, values, out_int32=out_int32, right=right)


@rule("histc")
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
