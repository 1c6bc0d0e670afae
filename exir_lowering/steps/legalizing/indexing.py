"""Rules for what reads and writes by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exir_lowering.steps.legalizing.registry import rule, widened, within


@rule("take.default")
def _take(x: Tensor, index: Tensor) -> Tensor:
    index = index.to(torch.int64)
    return x.reshape(-1)[torch.where(index < 0, index + x.numel(), index)]


@rule("masked_select.default")
def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    x, mask = torch.broadcast_tensors(x, mask)  # type: ignore[no-untyped-call]
    return torch.masked_select(x.contiguous(), mask.contiguous())


def _extreme(dtype: torch.dtype, largest: bool) -> Any:
    """Return what changes no maximum, or no minimum."""
    if dtype.is_floating_point:
        return float("-inf" if largest else "inf")
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def _reduced(mask: Tensor, values: Tensor, reduce: str) -> Tensor:
    """Reduce along the last dimension what a mask chooses of some values."""
    if reduce == "prod":
        return torch.where(mask, values, 1).prod(-1, dtype=values.dtype)
    neutral = torch.full((), _extreme(values.dtype, reduce == "amax"), dtype=values.dtype)
    chosen = torch.where(mask, values, neutral)
    return chosen.amax(-1) if reduce == "amax" else chosen.amin(-1)


@rule("scatter_reduce.two")
def _scatter_reduce(x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True) -> Any:
    wider = x.to(torch.int64) if x.dtype is torch.bool else widened(x)
    if wider is not x:
        wide = _scatter_reduce(wider, dim, index, src.to(wider.dtype), reduce, include_self=include_self)
        return wide if wide is NotImplemented else wide.to(x.dtype)
    if x.dim() == 0:
        rows = _scatter_reduce(x.reshape(1), 0, index.reshape(-1), src.reshape(-1), reduce, include_self=include_self)
        return rows if rows is NotImplemented else rows.reshape(())
    if 0 in index.shape:
        return x.clone()
    dim, index, size = dim % x.dim(), index.to(torch.int64), x.shape[dim]
    part = x
    for other in range(x.dim()):
        src = src.narrow(other, 0, index.shape[other])
        if other != dim and x.shape[other] != index.shape[other]:
            part = part.narrow(other, 0, index.shape[other])
    counts = torch.zeros(part.shape, dtype=torch.int64).scatter_add(dim, index, torch.ones_like(index))
    if reduce in ("sum", "mean"):
        start = part if include_self else torch.where(counts > 0, 0, part)
        found = start.scatter_add(dim, index, src)
        if reduce == "mean":
            counts = torch.clamp(counts + 1 if include_self else counts, min=1)
            exact = x.dtype.is_floating_point
            found = found / counts.to(x.dtype) if exact else torch.div(found, counts, rounding_mode="floor")
            found = found.to(x.dtype)
    else:
        if not within(*index.shape, size):
            return NotImplemented
        mask = index.movedim(dim, -1).unsqueeze(-2) == torch.arange(size).unsqueeze(-1)
        found = _reduced(mask, src.movedim(dim, -1).unsqueeze(-2), reduce).movedim(-1, dim)
        if include_self:
            join = {"prod": torch.mul, "amax": torch.maximum, "amin": torch.minimum}[reduce]
            found = join(found, part)
        else:
            found = torch.where(counts > 0, found, part)
    if found.shape == x.shape:
        return found
    whole = x.clone()
    whole[tuple(slice(0, length) for length in found.shape)] = found
    return whole


@rule("index_reduce.default")
def _index_reduce(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True) -> Any:
    if x.dim() == 0:
        return _scatter_reduce(x, dim, index, source, reduce, include_self=include_self)
    shape = [-1 if other == dim % x.dim() else 1 for other in range(x.dim())]
    wide = index.reshape(shape).expand(source.shape).contiguous()
    return _scatter_reduce(x, dim, wide, source, reduce, include_self=include_self)


@rule("_embedding_bag.default", "_embedding_bag_forward_only.default")
def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    count, width, kind = indices.shape[0], weight.shape[1], offsets.dtype
    bags = offsets.shape[0] - include_last_offset
    if not within(count, offsets.shape[0]) or not within(count, bags if mode == 2 else 1, width):
        return NotImplemented
    indices, offsets = indices.to(torch.int64), offsets.to(torch.int64)
    place = torch.arange(count)
    bag = (offsets[:bags] <= place.unsqueeze(-1)).sum(-1) - 1
    kept = indices != padding_idx if padding_idx >= 0 else torch.ones_like(indices, dtype=torch.bool)
    if include_last_offset:
        kept = kept & (place < offsets[-1])
    sizes = torch.zeros(bags, dtype=torch.int64).scatter_add(0, bag, kept.to(torch.int64))
    rows = widened(torch.index_select(weight, 0, indices))
    rows = rows if per_sample_weights is None else rows * per_sample_weights.unsqueeze(-1)
    if mode == 2:
        chosen = (bag == torch.arange(bags).unsqueeze(-1)) & kept
        found = _reduced(chosen.unsqueeze(-2), rows.t().unsqueeze(0), "amax")
        found = torch.where(sizes.unsqueeze(-1) > 0, found, 0)
        same = chosen.unsqueeze(-1) & (rows == found.unsqueeze(1))
        first = torch.where(same, place.unsqueeze(-1), count).amin(1)
        largest = torch.where(first < count, indices[torch.clamp(first, max=count - 1)], 0)
    else:
        wide = bag.unsqueeze(-1).expand(count, width).contiguous()
        added = torch.zeros(bags, width, dtype=rows.dtype)
        found = added.scatter_add(0, wide, torch.where(kept.unsqueeze(-1), rows, 0))
        found = found / torch.clamp(sizes, min=1).unsqueeze(-1).to(found.dtype) if mode == 1 else found
        largest = sizes
    fast = weight.dtype in (torch.float32, torch.float16) and padding_idx < 0 and mode == 0
    return found.to(weight.dtype), (bag[:0] if fast else bag).to(kind), sizes.to(kind), largest.to(kind)


@rule("put.default")
def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    index = index.to(torch.int64).reshape(-1)
    places, flat = torch.where(index < 0, index + x.numel(), index), x.reshape(-1)
    put = flat.scatter_add if accumulate else flat.scatter
    return put(0, places, source.reshape(-1)).reshape(x.shape)


@rule("scatter.reduce")
def _scatter_joined(x: Tensor, dim: int, index: Tensor, src: Tensor, *, reduce: str) -> Any:
    return _scatter_reduce(x, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce])


@rule("scatter.value_reduce")
def _scatter_value_joined(x: Tensor, dim: int, index: Tensor, value: float, *, reduce: str) -> Any:
    return _scatter_joined(x, dim, index, torch.full(index.shape, value, dtype=x.dtype), reduce=reduce)


@rule("diagonal_scatter.default")
def _diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    last = x.movedim((dim1, dim2), (-2, -1))
    high, width = last.shape[-2:]
    steps = torch.arange(src.shape[-1])
    places = (steps + max(-offset, 0)) * width + steps + max(offset, 0)
    flat = last.reshape(*last.shape[:-2], high * width)
    flat = flat.scatter(-1, places.expand(src.shape).contiguous(), src.to(x.dtype))
    return flat.reshape(last.shape).movedim((-2, -1), (dim1, dim2)).contiguous()


@rule("as_strided_scatter.default")
def _as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    if not x.is_contiguous():
        return NotImplemented
    places = torch.full((), storage_offset or 0, dtype=torch.int64)
    for length, step in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + torch.arange(length) * step
    return x.reshape(-1).scatter(0, places.reshape(-1), src.reshape(-1)).reshape(x.shape)


@rule("segment_reduce.default")
def _segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Any:
    given = lengths if lengths is not None else offsets
    if given is None or indices is not None or axis != given.dim() - 1:
        return NotImplemented
    ends = given[..., 1:] if lengths is None else given.cumsum(-1)
    starts = given[..., :-1] if lengths is None else ends - given
    place, rest = torch.arange(data.shape[axis]), data.shape[axis + 1 :]
    if not within(*ends.shape, data.shape[axis], *rest):
        return NotImplemented
    mask = (place >= starts.unsqueeze(-1)) & (place < ends.unsqueeze(-1))
    wide = mask.reshape(*mask.shape, *[1] * len(rest))
    rows, dim, kind = widened(data).unsqueeze(axis), axis + 1, reduce.replace("min", "amin").replace("max", "amax")
    count = mask.sum(-1).reshape(*ends.shape, *[1] * len(rest))
    if kind in ("sum", "mean"):
        found = torch.where(wide, rows, 0).sum(dim) + (initial or 0)
        if kind == "mean":
            found = found / count.to(found.dtype)
            found = found if initial is None else torch.where(count == 0, initial, found)
        return found.to(data.dtype)
    found = _reduced(wide.movedim(dim, -1), rows.movedim(dim, -1), kind)
    if initial is not None:
        first = torch.full((), initial, dtype=found.dtype)
        found = {"prod": torch.mul, "amax": torch.maximum, "amin": torch.minimum}[kind](found, first)
    return found.to(data.dtype)
