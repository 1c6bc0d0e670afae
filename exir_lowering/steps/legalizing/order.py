"""Rules for what orders elements, by comparing all pairs: an element's rank is how many come before it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from exir_lowering.steps.legalizing.registry import rule, widened, within


def _nan(x: Tensor) -> Tensor:
    return x != x


def _at_end(x: Tensor, dim: int) -> Tensor:
    """Return a tensor with a dimension moved to the end; one without dimensions gets one."""
    return (x.unsqueeze(0) if x.dim() == 0 else x.movedim(dim, -1)).contiguous()


def _back(x: Tensor, dim: int, like: Tensor, keepdim: bool = True) -> Tensor:
    if like.dim() == 0:
        return x.reshape(())
    return x.movedim(-1, dim) if keepdim else x.squeeze(-1)


def _ascending(x: Tensor, descending: bool = False) -> Tensor:
    """Return the places of the elements in their order in the last dimension: stable, NaN last."""
    size = x.shape[-1]
    one, other = x.unsqueeze(-1), x.unsqueeze(-2)
    place = torch.arange(size)
    earlier = place.unsqueeze(-1) > place
    if descending:
        before, same = other > one, other == one
    else:
        before, same = other < one, other == one
    if x.is_floating_point():
        first, second = (_nan(other), _nan(one)) if descending else (_nan(one), _nan(other))
        before, same = before | (first & ~second), same | (first & second)
    rank = (before | (same & earlier)).sum(-1)
    return torch.zeros_like(rank).scatter(-1, rank, place.expand(rank.shape).contiguous())


def _sorted(x: Tensor, dim: int, descending: bool = False) -> Any:
    """Return the values in their order and their places, with the dimension at the end."""
    x = _at_end(x, dim)
    if not within(*x.shape, x.shape[-1]):
        return None
    places = _ascending(x, descending)
    return x.gather(-1, places), places


@rule("sort.default")
def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> Any:
    found = _sorted(x, dim, descending)
    return NotImplemented if found is None else tuple(_back(one, dim, x) for one in found)


@rule("sort.stable")
def _stable_sort(x: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Any:
    return _sort(x, dim, descending)


@rule("topk.default")
def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> Any:
    found = _sorted(x, dim, largest)
    return NotImplemented if found is None else tuple(_back(one[..., :k], dim, x) for one in found)


@rule("kthvalue.default")
def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    found = _sorted(x, dim)
    return NotImplemented if found is None else tuple(_back(one[..., k - 1 : k], dim, x, keepdim) for one in found)


def _middle(x: Tensor, dim: int, keepdim: bool, skip_nan: bool) -> Any:
    found = _sorted(x, dim)
    if found is None:
        return NotImplemented
    values = found[0]
    last = (~_nan(values)).sum(-1, keepdim=True) - 1
    middle = torch.div(torch.clamp(last, min=0), 2, rounding_mode="floor")
    if not skip_nan and x.is_floating_point():  # the first NaN, if there is one
        middle = torch.where(last + 1 < values.shape[-1], last + 1, middle)
    return tuple(_back(one.gather(-1, middle), dim, x, keepdim) for one in found)


@rule("median.dim")
def _median(x: Tensor, dim: int = -1, keepdim: bool = False) -> Any:
    return _middle(x, dim, keepdim, skip_nan=False)


@rule("nanmedian.dim")
def _nanmedian(x: Tensor, dim: int = -1, keepdim: bool = False) -> Any:
    return _middle(x, dim, keepdim, skip_nan=True)


@rule("median.default")
def _median_of_all(x: Tensor) -> Any:
    found = _middle(x.reshape(-1), 0, False, skip_nan=False)
    return found if found is NotImplemented else found[0]


@rule("nanmedian.default")
def _nanmedian_of_all(x: Tensor) -> Any:
    found = _middle(x.reshape(-1), 0, False, skip_nan=True)
    return found if found is NotImplemented else found[0]


@rule("mode.default")
def _mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> Any:
    found = _sorted(x, dim)
    if found is None:
        return NotImplemented
    values, places = found
    same = values.unsqueeze(-1) == values.unsqueeze(-2)
    count = torch.clamp(same.sum(-1), min=1)  # a NaN equals nothing
    first = (count == count.amax(-1, keepdim=True)).to(torch.int64).argmax(-1, keepdim=True)
    last = first + count.gather(-1, first) - 1
    return _back(values.gather(-1, first), dim, x, keepdim), _back(places.gather(-1, last), dim, x, keepdim)


def _running(x: Tensor, dim: int, largest: bool) -> Any:
    """Return the largest or smallest of what comes so far, NaN before all, and its last place."""
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64)
    rows = _at_end(x, dim)
    size = rows.shape[-1]
    if not within(*rows.shape, size):
        return NotImplemented
    place = torch.arange(size)
    given, seen = rows.unsqueeze(-2), place.unsqueeze(-1) >= place
    other = torch.where(seen, given, rows.unsqueeze(-1))  # its own value for what comes later
    best = other.amax(-1, keepdim=True) if largest else other.amin(-1, keepdim=True)
    equal = (given == best) | (_nan(given) & _nan(best)) if x.is_floating_point() else given == best
    last = torch.where(seen & equal, place, -1).amax(-1)
    return _back(best.squeeze(-1), dim, x), _back(last, dim, x)


@rule("cummax.default")
def _cummax(x: Tensor, dim: int) -> Any:
    return _running(x, dim, True)


@rule("cummin.default")
def _cummin(x: Tensor, dim: int) -> Any:
    return _running(x, dim, False)


@rule("logcumsumexp.default")
def _logcumsumexp(x: Tensor, dim: int) -> Any:
    if x.dim() == 0:
        return x.clone()
    rows = widened(_at_end(x, dim))
    if not within(*rows.shape, rows.shape[-1]):
        return NotImplemented
    place = torch.arange(rows.shape[-1])
    seen = torch.where(place.unsqueeze(-1) >= place, rows.unsqueeze(-2), -math.inf)
    return _back(torch.logsumexp(seen, -1), dim, x).to(x.dtype)


@rule("searchsorted.Tensor")
def _searchsorted(
    ordered: Tensor,
    values: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Any:
    ordered = ordered if sorter is None else ordered.gather(-1, sorter)
    dtype = torch.promote_types(ordered.dtype, values.dtype)
    ordered, given = ordered.to(dtype), values.to(dtype).unsqueeze(-1)
    if not within(*values.shape, ordered.shape[-1]):
        return NotImplemented
    ordered = ordered.unsqueeze(-2) if ordered.dim() > 1 else ordered
    before = ~(ordered > given) if right or side == "right" else ~(ordered >= given)
    return before.sum(-1).to(torch.int32 if out_int32 else torch.int64)


@rule("searchsorted.Scalar")
def _searchsorted_scalar(ordered: Tensor, value: float, **kwargs: Any) -> Any:
    return _searchsorted(ordered, torch.full((), value, dtype=ordered.dtype), **kwargs)


@rule("bucketize.Tensor")
def _bucketize(values: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Any:
    return _searchsorted(boundaries, values, out_int32=out_int32, right=right)


@rule("bucketize.Scalar")
def _bucketize_scalar(value: float, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Any:
    return _searchsorted_scalar(boundaries, value, out_int32=out_int32, right=right)


@rule("histc.default")
def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    if not within(x.numel(), bins) or (min == max and x.numel() == 0):
        return NotImplemented
    flat = x.reshape(-1)
    if min == max:
        low, high = flat.amin(), flat.amax()
        low, high = torch.where(low == high, low - 1, low), torch.where(low == high, high + 1, high)
    else:
        low, high = torch.full((), min, dtype=x.dtype), torch.full((), max, dtype=x.dtype)
    inside = (flat >= low) & (flat <= high)
    place = (torch.where(inside, flat, low) - low) * bins / (high - low)
    place = torch.clamp(place.to(torch.int64), max=bins - 1)
    return ((place.unsqueeze(-1) == torch.arange(bins)) & inside.unsqueeze(-1)).sum(0).to(x.dtype)
