"""Rules for what reads and writes by index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exir_lowering.steps.legalizing.registry import require, require_small, rule, widened


@rule("take")
def _take(x: Tensor, index: Tensor) -> Tensor:
    index = index.to(torch.int64)
    return x.reshape(-1)[torch.where(index < 0, index + x.numel(), index)]


@rule("put")
def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    places = torch.where(index < 0, index + x.numel(), index).to(torch.int64).reshape(-1)
    put = x.reshape(-1).scatter_add if accumulate else x.reshape(-1).scatter
    return put(0, places, source.reshape(-1)).reshape(x.shape)


@rule("masked_select")
def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    x, mask = torch.broadcast_tensors(x, mask)  # type: ignore[no-untyped-call]
    return torch.masked_select(x.contiguous(), mask.contiguous())


def _scattering(name: str, view: Callable[..., Tensor]) -> None:
    """Write where a view of all places is."""

    @rule(name)
    def _(x: Tensor, src: Tensor, *args: Any) -> Tensor:
        require(x.is_contiguous())
        places = view(torch.arange(x.numel()).reshape(x.shape), *args)
        return x.reshape(-1).scatter(0, places.reshape(-1), src.to(x.dtype).reshape(-1)).reshape(x.shape)


_scattering("diagonal_scatter", torch.diagonal)
_scattering("as_strided_scatter", torch.as_strided)


def _reduced(mask: Tensor, values: Tensor, reduce: str) -> Any:
    """Reduce along the last dimension what a mask chooses of some values."""
    if reduce == "prod":
        return torch.where(mask, values, 1).prod(-1, dtype=values.dtype)
    floating = values.dtype.is_floating_point
    least, most = (
        (-torch.inf, torch.inf) if floating else (torch.iinfo(values.dtype).min, torch.iinfo(values.dtype).max)
    )
    neutral = torch.full((), least if reduce == "amax" else most, dtype=values.dtype)
    return getattr(torch.where(mask, values, neutral), reduce)(-1)


@rule("scatter_reduce.two")
def _scatter_reduce(x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True) -> Any:
    wider = x.to(torch.int64) if x.dtype is torch.bool else widened(x)
    if wider is not x:
        wide = _scatter_reduce(wider, dim, index, src.to(wider.dtype), reduce, include_self=include_self)
        return wide.to(x.dtype)
    if x.dim() == 0:
        rows = _scatter_reduce(x.reshape(1), 0, index.reshape(-1), src.reshape(-1), reduce, include_self=include_self)
        return rows.reshape(())
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
        require_small(*index.shape, size)
        mask = index.movedim(dim, -1).unsqueeze(-2) == torch.arange(size).unsqueeze(-1)
        found = _reduced(mask, src.movedim(dim, -1).unsqueeze(-2), reduce).movedim(-1, dim)
        join = {"prod": torch.mul, "amax": torch.maximum, "amin": torch.minimum}[reduce]
        found = join(found, part) if include_self else torch.where(counts > 0, found, part)
    if found.shape == x.shape:
        return found
    whole = x.clone()
    whole[tuple(slice(0, length) for length in found.shape)] = found
    return whole


@rule("scatter.reduce", "scatter.value_reduce")
def _scatter_joined(x: Tensor, dim: int, index: Tensor, src: Any, *, reduce: str) -> Any:
    src = src if isinstance(src, Tensor) else torch.full(index.shape, src, dtype=x.dtype)
    return _scatter_reduce(x, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce])


@rule("index_reduce")
def _index_reduce(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True) -> Any:
    if x.dim() > 0:
        index = index.reshape([-1 if other == dim % x.dim() else 1 for other in range(x.dim())])
        index = index.expand(source.shape).contiguous()
    return _scatter_reduce(x, dim, index, source, reduce, include_self=include_self)


@rule("_embedding_bag", "_embedding_bag_forward_only")
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
    require_small(count, offsets.shape[0])
    require_small(count, bags if mode == 2 else 1, width)
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
