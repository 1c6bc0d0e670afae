"""Rules for what slides over space: padding, pooling, convolutions in three dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from exir_lowering.steps.legalizing.registry import require, rule

Windows = tuple[Tensor, Tensor]
"""Where along a dimension the windows read: by window and element the places, brought inside, and whether they were."""


@rule("constant_pad_nd")
def _constant_pad(x: Tensor, pad: Sequence[int], value: float = 0) -> Any:
    require(all(isinstance(each, int) for each in pad) and min(pad, default=0) < 0)
    for number in range(len(pad) // 2):
        before, after, dim = min(pad[2 * number], 0), min(pad[2 * number + 1], 0), x.dim() - 1 - number
        x = x.narrow(dim, -before, x.shape[dim] + before + after)
    rest = [max(each, 0) for each in pad]
    return torch.constant_pad_nd(x, rest, value) if any(rest) else x.clone()


def _listed(value: Any, count: int, default: Sequence[int] = ()) -> list[int]:
    given = [value] if isinstance(value, int) else list(value or default)
    return given * count if len(given) == 1 else given


def _windows(size: Any, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> Windows:
    reach = size + 2 * padding - dilation * (kernel - 1) - 1
    count = reach // stride + 1
    if ceil:
        require(isinstance(size, int))
        count = -(-reach // stride) + 1
        count -= (count - 1) * stride >= size + padding
    places = (torch.arange(count) * stride - padding).unsqueeze(-1) + torch.arange(kernel) * dilation
    return torch.clamp(torch.clamp(places, min=0), max=size - 1), (places >= 0) & (places < size)


def _adaptive(x: Tensor, counts: Sequence[int]) -> list[Windows]:
    found = []
    for size, count in zip(x.shape[-len(counts) :], counts, strict=True):
        require(isinstance(size, int))
        width = max(-(-(place + 1) * size // count) - place * size // count for place in range(count))
        starts = torch.div(torch.arange(count) * size, count, rounding_mode="floor").unsqueeze(-1)
        ends = torch.div((torch.arange(count) + 1) * size + (count - 1), count, rounding_mode="floor")
        places = starts + torch.arange(width)
        found.append((torch.clamp(places, max=size - 1), places < ends.unsqueeze(-1)))
    return found


def _taken(x: Tensor, dim: int, windows: Windows, otherwise: Any) -> Tensor:
    """Return what windows read along a dimension, counted from the end, each window's elements behind it."""
    places, inside = windows
    taken, after = x.index_select(dim, places.reshape(-1)), -1 - dim
    taken = taken.reshape(*x.shape[:dim], *places.shape, *x.shape[x.dim() - after :])
    return torch.where(inside.reshape(*inside.shape, *[1] * after), taken, otherwise)


def _greatest(x: Tensor, windows: Sequence[Windows]) -> tuple[Tensor, Tensor]:
    """Return the maxima over windows and where they are: the first one, but of NaNs the last."""
    sizes, least = x.shape[-len(windows) :], -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    found, at = x, torch.arange(math.prod(sizes)).reshape(sizes).expand(x.shape)
    for dim in range(-1, -1 - len(windows), -1):
        value = _taken(found, dim, windows[dim], torch.full((), least, dtype=x.dtype))
        inside = _taken(torch.ones_like(at, dtype=torch.bool), dim, windows[dim], False)
        best, element = value.amax(dim, keepdim=True), torch.arange(value.shape[dim]).reshape([-1, *[1] * (-1 - dim)])
        first = torch.where((value == best) & inside, element, value.shape[dim]).amin(dim, keepdim=True)
        last = torch.where(value != value, element, -1).amax(dim, keepdim=True)
        chosen = torch.where(best != best, last, first)
        at = _taken(at, dim, windows[dim], 0).gather(dim, chosen).squeeze(dim)
        found = best.squeeze(dim)
    return found, at


def _all_windows(
    x: Tensor, dims: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> list[Windows]:
    kernel = _listed(kernel, dims)
    given = (kernel, _listed(stride, dims, kernel), _listed(padding, dims), _listed(dilation, dims))
    return [_windows(*each, ceil) for each in zip(x.shape[-dims:], *given, strict=True)]


def _max_pool(
    dims: int, x: Tensor, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Any:
    return _greatest(x, _all_windows(x, dims, kernel, stride, padding, dilation, ceil_mode))


@rule("adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max_pool(x: Tensor, output_size: Sequence[int]) -> Any:
    return _greatest(x, _adaptive(x, output_size))


def _summed(x: Tensor, windows: Sequence[Windows]) -> Tensor:
    for dim in range(-1, -1 - len(windows), -1):
        x = _taken(x, dim, windows[dim], 0).sum(dim)
    return x


@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", wide=torch.float32)
def _adaptive_avg_pool(x: Tensor, output_size: Sequence[int]) -> Any:
    windows = _adaptive(x, output_size)
    return _summed(x, windows) / _summed(torch.ones(x.shape[-len(windows) :], dtype=x.dtype), windows)


def _avg_pool(
    dims: int,
    x: Tensor,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    found = _summed(x, _all_windows(x, dims, kernel, stride, padding, 1, ceil_mode))
    count = torch.ones((), dtype=torch.int64)
    kernel = _listed(kernel, dims)
    given = (kernel, _listed(stride, dims, kernel), _listed(padding, dims))
    for number, (size, length, step, pad) in enumerate(zip(x.shape[-dims:], *given, strict=True)):
        start = torch.arange(found.shape[number - dims]) * step - pad
        end = torch.clamp(start + length, max=size + pad)
        if not count_include_pad:
            start, end = torch.clamp(start, min=0), torch.clamp(end, max=size)
        count = count * (end - start).reshape([-1, *[1] * (dims - 1 - number)])
    if divisor_override is not None:
        count = torch.full((), divisor_override, dtype=torch.int64)
    return found / count.to(found.dtype) if x.is_floating_point() else torch.div(found, count, rounding_mode="trunc")


for _dims in (2, 3):
    rule(f"max_pool{_dims}d_with_indices")(partial(_max_pool, _dims))
    rule(f"avg_pool{_dims}d", wide=torch.float32)(partial(_avg_pool, _dims))


@rule("convolution", wide=torch.float32)
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
    require(x.dim() == 5)
    (s, *flat_stride), (p, *flat_padding), (d, *flat_dilation), (o, *flat_output) = (
        _listed(each, 3) for each in (stride, padding, dilation, output_padding)
    )
    batch, channels, depth, *plane = x.shape
    steps = weight.shape[2]
    if not transposed:
        x = F.pad(x, [0, 0, 0, 0, p, p]) if p else x
        made = (depth + 2 * p - d * (steps - 1) - 1) // s + 1
        slices = [x[:, :, k * d : k * d + (made - 1) * s + 1 : s] for k in range(steps)]
        x = torch.stack(slices, 3).permute(0, 2, 1, 3, 4, 5).reshape(batch * made, channels * steps, *plane)
        weight = weight.reshape(weight.shape[0], -1, *weight.shape[3:])
        found = F.conv2d(x, weight, bias, tuple(flat_stride), tuple(flat_padding), tuple(flat_dilation), groups)
        return found.reshape(batch, made, *found.shape[1:]).permute(0, 2, 1, 3, 4).contiguous()
    flat = x.permute(0, 2, 1, 3, 4).reshape(batch * depth, channels, *plane)
    total: Any = None
    for k in range(steps):
        given = (weight[:, :, k], None, flat_stride, flat_padding, flat_output, groups, flat_dilation)
        part = F.conv_transpose2d(flat, *given)
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
        away = torch.fmod((place - low).abs(), 2 * span) if span else place * 0
        place = torch.clamp(torch.minimum(away, 2 * span - away) + low, 0, size - 1)
    return place


@rule("grid_sampler_3d", wide=torch.float32)
def _grid_sampler_3d(x: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Any:
    batch, channels, *sizes = x.shape
    require(interpolation_mode < 2 and all(isinstance(size, int) for size in sizes))
    places = [_unnormalized(grid[..., 2 - k], sizes[k], padding_mode, align_corners) for k in range(3)]
    shape = places[0].shape
    flat = x.reshape(batch, channels, -1)
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
    return total
