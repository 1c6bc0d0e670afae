"""Rules for what slides over space: padding, pooling, convolutions in three dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from exir_lowering.steps.legalizing.registry import rule, widened

Taps = list[tuple[Tensor, Tensor]]
"""Where along a dimension the windows read: for each element of a window the places, and whether they are inside."""


@rule("constant_pad_nd.default")
def _constant_pad(x: Tensor, pad: Sequence[int], value: float = 0) -> Any:
    if not all(isinstance(each, int) for each in pad) or min(pad, default=0) >= 0:
        return NotImplemented
    for number in range(len(pad) // 2):
        before, after, dim = min(pad[2 * number], 0), min(pad[2 * number + 1], 0), x.dim() - 1 - number
        x = x.narrow(dim, -before, x.shape[dim] + before + after)
    rest = [max(each, 0) for each in pad]
    return torch.constant_pad_nd(x, rest, value) if any(rest) else x.clone()


def _listed(value: Any, count: int, default: Sequence[int] = ()) -> list[int]:
    given = (
        list(default)
        if value is None or value == () or value == []
        else [value]
        if isinstance(value, int)
        else list(value)
    )
    return given * count if len(given) == 1 else given


def _length(size: Any, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> Any:
    """Return how many windows there are; None if that is not known of a symbolic size."""
    reach = size + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil:
        return reach // stride + 1
    if not isinstance(size, int):
        return None
    count = -(-reach // stride) + 1
    return count - ((count - 1) * stride >= size + padding)


def _taps(size: Any, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> Taps | None:
    count = _length(size, kernel, stride, padding, dilation, ceil)
    if count is None:
        return None
    starts = torch.arange(count) * stride - padding
    places = [starts + k * dilation for k in range(kernel)]
    return [(torch.clamp(torch.clamp(each, min=0), max=size - 1), (each >= 0) & (each < size)) for each in places]


def _adaptive_taps(size: Any, count: int) -> Taps | None:
    if not isinstance(size, int):
        return None
    bounds = [(place * size // count, -(-(place + 1) * size // count)) for place in range(count)]
    starts = torch.div(torch.arange(count) * size, count, rounding_mode="floor")
    ends = torch.div((torch.arange(count) + 1) * size + (count - 1), count, rounding_mode="floor")
    places = [starts + k for k in range(max(end - start for start, end in bounds))]
    return [(torch.clamp(each, max=size - 1), each < ends) for each in places]


def _along(mask: Tensor, dim: int) -> Tensor:
    return mask.reshape([-1, *[1] * (-1 - dim)])


def _greatest(x: Tensor, taps: Sequence[Taps | None]) -> Any:
    """Return the maxima over windows and where they are: the first one, but of NaNs the last."""
    if None in taps:
        return NotImplemented
    sizes, found, places = x.shape[-len(taps) :], x, torch.zeros((), dtype=torch.int64)
    for dim in range(-1, -1 - len(taps), -1):
        step = math.prod(sizes[dim + 1 :]) if dim < -1 else 1
        best: Any = None
        for place, inside in taps[dim] or ():
            value = found.index_select(dim, place)
            within = _along(inside, dim)
            where = places.index_select(dim, place) if places.dim() else places
            where = where + _along(place * step, dim)
            if best is None:
                best, at, any_inside = value, where.expand(value.shape), within
                continue
            better = (value > best) | (value != value) if value.is_floating_point() else value > best
            better = within & (better | ~any_inside)
            best, at = torch.where(better, value, best), torch.where(better, where, at)
            any_inside = any_inside | within
        found, places = best, at.contiguous()
    return found, places


def _pooling(x: Tensor, dims: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> list[Any]:
    kernel = _listed(kernel, dims)
    stride, padding, dilation = _listed(stride, dims, kernel), _listed(padding, dims), _listed(dilation, dims)
    sizes = x.shape[-dims:]
    return [_taps(*each, ceil) for each in zip(sizes, kernel, stride, padding, dilation, strict=True)]


@rule("max_pool2d_with_indices.default")
def _max_pool2d(
    x: Tensor, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Any:
    return _greatest(x, _pooling(x, 2, kernel, stride, padding, dilation, ceil_mode))


@rule("max_pool3d_with_indices.default")
def _max_pool3d(
    x: Tensor, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Any:
    return _greatest(x, _pooling(x, 3, kernel, stride, padding, dilation, ceil_mode))


@rule("adaptive_max_pool2d.default", "adaptive_max_pool3d.default")
def _adaptive_max_pool(x: Tensor, output_size: Sequence[int]) -> Any:
    sizes = x.shape[-len(output_size) :]
    return _greatest(x, [_adaptive_taps(size, count) for size, count in zip(sizes, output_size, strict=True)])


def _summed(x: Tensor, taps: Sequence[Taps]) -> Tensor:
    for dim in range(-1, -1 - len(taps), -1):
        parts = [torch.where(_along(inside, dim), x.index_select(dim, place), 0) for place, inside in taps[dim]]
        x = parts[0]
        for part in parts[1:]:
            x = x + part
    return x


@rule("_adaptive_avg_pool3d.default", "_adaptive_avg_pool2d.default")
def _adaptive_avg_pool(x: Tensor, output_size: Sequence[int]) -> Any:
    sizes = x.shape[-len(output_size) :]
    taps = [_adaptive_taps(size, count) for size, count in zip(sizes, output_size, strict=True)]
    if None in taps:
        return NotImplemented
    known = [each for each in taps if each is not None]
    count = torch.ones((), dtype=torch.int64)
    for number, each in enumerate(known):
        inside = sum((one.to(torch.int64) for _, one in each[1:]), each[0][1].to(torch.int64))
        count = count * _along(inside, number - len(known))
    return (_summed(widened(x), known) / count.to(widened(x).dtype)).to(x.dtype)


@rule("avg_pool3d.default", "avg_pool2d.default")
def _avg_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    dims = 3 if x.dim() == 5 or len(kernel) == 3 else 2
    kernel, padding = _listed(kernel, dims), _listed(padding, dims)
    stride = _listed(stride, dims, kernel)
    taps = _pooling(x, dims, kernel, stride, padding, 1, ceil_mode)
    if None in taps:
        return NotImplemented
    found, count = _summed(widened(x), taps), torch.ones((), dtype=torch.int64)
    for number, (size, length, step, pad) in enumerate(zip(x.shape[-dims:], kernel, stride, padding, strict=True)):
        start = torch.arange(found.shape[number - dims]) * step - pad
        end = torch.clamp(start + length, max=size + pad)
        if not count_include_pad:
            start, end = torch.clamp(start, min=0), torch.clamp(end, max=size)
        count = count * _along(end - start, number - dims)
    if divisor_override is not None:
        count = torch.full((), divisor_override, dtype=torch.int64)
    if not x.is_floating_point():
        return torch.div(found, count, rounding_mode="trunc")
    return (found / count.to(found.dtype)).to(x.dtype)


@rule("convolution.default")
def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """In three dimensions: by those in two, with the steps in depth as channels, or summed."""
    if x.dim() != 5:
        return NotImplemented
    if widened(x) is not x:
        bias = None if bias is None else widened(bias)
        wide = (widened(x), widened(weight), bias, stride, padding, dilation, transposed, output_padding, groups)
        return _convolution(*wide).to(x.dtype)
    (s, *flat_stride), (p, *flat_padding), (d, *flat_dilation) = (
        _listed(each, 3) for each in (stride, padding, dilation)
    )
    o, *flat_output = _listed(output_padding, 3)
    batch, channels, depth, *plane = x.shape
    steps = weight.shape[2]
    if transposed:
        return _transposed(x, weight, bias, (s, p, d, o), flat_stride, flat_padding, flat_output, groups, flat_dilation)
    x = F.pad(x, [0, 0, 0, 0, p, p]) if p else x
    made = (depth + 2 * p - d * (steps - 1) - 1) // s + 1
    slices = [x[:, :, k * d : k * d + (made - 1) * s + 1 : s] for k in range(steps)]
    x = torch.stack(slices, 3).permute(0, 2, 1, 3, 4, 5).reshape(batch * made, channels * steps, *plane)
    weight = weight.reshape(weight.shape[0], -1, *weight.shape[3:])
    found = F.conv2d(x, weight, bias, tuple(flat_stride), tuple(flat_padding), tuple(flat_dilation), groups)
    return found.reshape(batch, made, *found.shape[1:]).permute(0, 2, 1, 3, 4).contiguous()


def _transposed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    along: tuple[int, int, int, int],
    stride: list[int],
    padding: list[int],
    output_padding: list[int],
    groups: int,
    dilation: list[int],
) -> Any:
    s, p, d, o = along
    batch, channels, depth, *plane = x.shape
    steps = weight.shape[2]
    flat = x.permute(0, 2, 1, 3, 4).reshape(batch * depth, channels, *plane)
    total: Any = None
    for k in range(steps):
        part = F.conv_transpose2d(flat, weight[:, :, k], None, stride, padding, output_padding, groups, dilation)
        part = part.reshape(batch, depth, 1, *part.shape[1:])
        part = F.pad(part, [0, 0, 0, 0, 0, 0, 0, s - 1]).reshape(batch, depth * s, *part.shape[3:])
        part = F.pad(part[:, : (depth - 1) * s + 1], [0, 0, 0, 0, 0, 0, k * d, (steps - 1 - k) * d + o])
        total = part if total is None else total + part
    found = total[:, p : total.shape[1] - p].permute(0, 2, 1, 3, 4).contiguous()
    return found if bias is None else found + bias.reshape(-1, 1, 1, 1)


def _unnormalized(place: Tensor, size: int, padding_mode: int, align_corners: bool) -> Tensor:
    """Return places in -1 to 1 as places in pixels, brought inside as the mode says."""
    place = (place + 1) / 2 * (size - 1) if align_corners else ((place + 1) * size - 1) / 2
    if padding_mode == 1:
        return torch.clamp(place, 0, size - 1)
    if padding_mode == 2:
        low, span = (0.0, float(size - 1)) if align_corners else (-0.5, float(size))
        away = (place - low).abs()
        turns = torch.floor(away / span) if span else away * 0
        extra = away - turns * span
        odd = (turns - 2 * torch.floor(turns / 2)) > 0
        place = torch.clamp(torch.where(odd, span - extra, extra) + low, 0, size - 1) if span else away * 0
    return place


@rule("grid_sampler_3d.default")
def _grid_sampler_3d(x: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Any:
    batch, channels, *sizes = x.shape
    if not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    image, wide = widened(x), widened(grid)
    places = [_unnormalized(wide[..., 2 - k], sizes[k], padding_mode, align_corners) for k in range(3)]
    shape = places[0].shape
    flat = image.reshape(batch, channels, -1)
    total: Any = None
    for corner in range(1 if interpolation_mode == 1 else 8):
        weight, inside, index = torch.ones_like(places[0]), None, torch.zeros(shape, dtype=torch.int64)
        for k, (place, size) in enumerate(zip(places, sizes, strict=True)):
            low = torch.floor(place)
            at = torch.round(place) if interpolation_mode == 1 else low + (corner >> k & 1)
            if interpolation_mode == 0:
                weight = weight * (place - low if corner >> k & 1 else low + 1 - place)
            valid = (at >= 0) & (at < size)
            inside = valid if inside is None else inside & valid
            index = index * size + torch.clamp(torch.where(valid, at, 0), 0, size - 1).to(torch.int64)
        wanted = index.reshape(batch, 1, -1).expand(batch, channels, index[0].numel()).contiguous()
        value = flat.gather(2, wanted).reshape(batch, channels, *shape[1:])
        part = torch.where(inside.unsqueeze(1), value * weight.unsqueeze(1), 0)  # type: ignore[union-attr]
        total = part if total is None else total + part
    return NotImplemented if interpolation_mode > 1 else total.to(x.dtype)
