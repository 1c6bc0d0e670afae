"""Rules for what slides over space: padding, pooling, convolutions and samples in three dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from exir_lowering.steps.legalizing.registry import require, rules


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


def _windows(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> list[Tensor]:
    """Return by dimension the places that windows read, by window and element; some lie outside."""
    found = []
    for size, length, step, pad, apart in zip(x.shape[-len(kernel) :], kernel, stride, padding, dilation, strict=True):
        reach = size + 2 * pad - apart * (length - 1) - 1
        count = reach // step + 1
        if ceil:
            require(isinstance(size, int))
            count = -(-reach // step) + 1
            count -= (count - 1) * step >= size + pad
        found.append((torch.arange(count) * step - pad).unsqueeze(-1) + torch.arange(length) * apart)
    return found


def _adaptive(x: Tensor, counts: Sequence[int]) -> list[Tensor]:
    found = []
    for size, count in zip(x.shape[-len(counts) :], counts, strict=True):
        require(isinstance(size, int))
        width = max(-(-(place + 1) * size // count) - place * size // count for place in range(count))
        starts = torch.div(torch.arange(count) * size, count, rounding_mode="floor").unsqueeze(-1)
        ends = torch.div((torch.arange(count) + 1) * size + (count - 1), count, rounding_mode="floor").unsqueeze(-1)
        places = starts + torch.arange(width)
        found.append(torch.where(places < ends, places, size))
    return found


def _taken(x: Tensor, dim: int, places: Tensor, otherwise: Any) -> Tensor:
    """Return what windows read along a dimension, counted from the end, each window's elements behind it."""
    size, after = x.shape[dim], -1 - dim
    taken = x.index_select(dim, torch.clamp(torch.clamp(places, min=0), max=size - 1).reshape(-1))
    taken = taken.reshape(*x.shape[:dim], *places.shape, *x.shape[x.dim() - after :])
    inside = (places >= 0) & (places < size)
    return torch.where(inside.reshape(*inside.shape, *[1] * after), taken, otherwise)


def _greatest(x: Tensor, windows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
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


def _max_pool(dims: int, x: Tensor, kernel: Any, *given: Any) -> Any:
    defaults: Any = ((), 0, 1, False)
    stride, padding, dilation, ceil = given + defaults[len(given) :]
    kernel = _listed(kernel, dims)
    steps = (_listed(stride, dims, kernel), _listed(padding, dims), _listed(dilation, dims))
    return _greatest(x, _windows(x, kernel, *steps, ceil))


def _mean(x: Tensor, windows: Sequence[Tensor], padding: Sequence[int], divisor: int | None = None) -> Tensor:
    """Return the means over windows, of which padding counts too."""
    found, count = x, torch.ones((), dtype=torch.int64)
    for dim in range(-1, -1 - len(windows), -1):
        places, pad = windows[dim], padding[dim]
        found = _taken(found, dim, places, 0).sum(dim)
        counted = ((places >= -pad) & (places < x.shape[dim] + pad)).sum(-1)
        count = count * counted.reshape([-1, *[1] * (-1 - dim)])
    if divisor is not None:
        count = torch.full((), divisor, dtype=torch.int64)
    return found / count.to(found.dtype) if x.is_floating_point() else torch.div(found, count, rounding_mode="trunc")


def _avg_pool(dims: int, x: Tensor, kernel: Any, *given: Any) -> Any:
    defaults: Any = ((), 0, False, True, None)
    stride, padding, ceil, pads_count, divisor = given + defaults[len(given) :]
    kernel, pads = _listed(kernel, dims), _listed(padding, dims)
    windows = _windows(x, kernel, _listed(stride, dims, kernel), pads, [1] * dims, ceil)
    return _mean(x, windows, pads if pads_count else [0] * dims, divisor)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *given: Any) -> Any:
    """In three dimensions: by those in two, with the steps in depth as channels."""
    require(x.dim() == 5)
    *apart, transposed, output_padding, groups = given
    apart = [_listed(each, 3) for each in (*apart, output_padding)]
    (s, *flat_stride), (p, *flat_padding), (d, *flat_dilation), (o, *flat_output) = apart
    batch, channels, depth, *plane = x.shape
    reach = d * (weight.shape[2] - 1)
    steps = [*range(weight.shape[2])]
    if transposed:  # in depth the one backward, of steps that are set apart by zeros
        x = F.pad(x.unsqueeze(3), [0, 0, 0, 0, 0, s - 1]).reshape(batch, channels, depth * s, *plane)
        x = F.pad(x[:, :, : (depth - 1) * s + 1], [0, 0, 0, 0, reach - p, reach - p + o])
        depth, s = (depth - 1) * s + 1 + 2 * (reach - p) + o, 1
        steps.reverse()
        weight = weight.transpose(1, 2).flatten(0, 1)
    else:
        x = F.pad(x, [0, 0, 0, 0, p, p]) if p else x
        depth, weight = depth + 2 * p, weight.flatten(1, 2)
    made = (depth - reach - 1) // s + 1
    slices = torch.stack([x[:, :, k * d : k * d + (made - 1) * s + 1 : s] for k in steps], 3)
    rows = slices.permute(0, 2, 1, 3, 4, 5).reshape(batch * made, channels * len(steps), *plane)
    if transposed:
        found = F.conv_transpose2d(rows, weight, bias, flat_stride, flat_padding, flat_output, groups, flat_dilation)
    else:
        found = F.conv2d(rows, weight, bias, tuple(flat_stride), tuple(flat_padding), tuple(flat_dilation), groups)
    return found.reshape(batch, made, *found.shape[1:]).permute(0, 2, 1, 3, 4).contiguous()


def _pixels(place: Tensor, size: int, padding: int, align_corners: bool) -> Tensor:
    """Return places in -1 to 1 as places in pixels, brought inside as the mode of padding says."""
    place = (place + 1) / 2 * (size - 1) if align_corners else ((place + 1) * size - 1) / 2
    if padding == 2:
        low, span = (0.0, float(size - 1)) if align_corners else (-0.5, float(size))
        away = torch.fmod((place - low).abs(), 2 * span) if span else place * 0
        place = torch.minimum(away, 2 * span - away) + low
    return torch.clamp(place, 0, size - 1) if padding else place


def _grid_sampler_3d(x: Tensor, grid: Tensor, interpolation: int, padding: int, align_corners: bool) -> Any:
    batch, channels, *sizes = x.shape
    require(interpolation < 2 and all(isinstance(size, int) for size in sizes))
    places = [_pixels(grid[..., 2 - k], sizes[k], padding, align_corners) for k in range(3)]
    total: Any = None
    for corner in range(1 if interpolation == 1 else 8):
        weight, index = torch.ones_like(places[0]), torch.zeros(places[0].shape, dtype=torch.int64)
        inside = torch.ones_like(index, dtype=torch.bool)
        for k, (place, size) in enumerate(zip(places, sizes, strict=True)):
            low, upper = torch.floor(place), corner >> k & 1
            at = torch.round(place) if interpolation == 1 else low + upper
            if interpolation == 0:
                weight = weight * (place - low if upper else low + 1 - place)
            valid = (at >= 0) & (at < size)
            inside = inside & valid
            index = index * size + torch.where(valid, at, 0).to(torch.int64)
        wanted = index.reshape(batch, 1, -1).expand(batch, channels, index[0].numel()).contiguous()
        value = x.reshape(batch, channels, -1).gather(2, wanted).reshape(batch, channels, *index.shape[1:])
        part = torch.where(inside.unsqueeze(1), value * weight.unsqueeze(1), 0)
        total = part if total is None else total + part
    return total


rules(
    {
        "constant_pad_nd": _constant_pad,
        "max_pool2d_with_indices": partial(_max_pool, 2),
        "max_pool3d_with_indices": partial(_max_pool, 3),
        "adaptive_max_pool2d adaptive_max_pool3d": lambda x, size: _greatest(x, _adaptive(x, size)),
    }
)
rules(
    {
        "avg_pool2d": partial(_avg_pool, 2),
        "avg_pool3d": partial(_avg_pool, 3),
        "_adaptive_avg_pool2d _adaptive_avg_pool3d": lambda x, size: _mean(x, _adaptive(x, size), [0] * len(size)),
        "convolution": _convolution,
        "grid_sampler_3d": _grid_sampler_3d,
    },
    wide=torch.float32,
)
