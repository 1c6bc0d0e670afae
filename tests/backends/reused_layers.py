"""Random networks that call layers several times: with other normalizations after them, and in other orders."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Step = tuple[int, Callable[..., Tensor], Sequence[str]]
"""The number of the value that it takes, what it does, and the names of the layers that it calls."""

_SHAPES = ((1, 4, 8, 8), (2, 4, 6, 6), (1, 4, 8), (2, 4, 4), (5, 6), (2, 3, 6))
_MOST_ELEMENTS = 4000


class ReusedLayers(nn.Module):
    """The network of a seed; `example` is an input.

    Args:
        seed: Which one; its weights, too, are those of the seed.
        normalized: Whether there may be batch normalizations.
    """

    def __init__(self, seed: int, *, normalized: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.example = torch.randn(_SHAPES[seed % len(_SHAPES)])
        self._draw = random.Random(seed)
        self._normalized = normalized
        self._layers = nn.ModuleDict()
        self._steps: list[Step] = []
        shapes = [self.example.shape]
        for _ in range(self._draw.randint(2, 7)):
            source = self._draw.randrange(max(0, len(shapes) - 3), len(shapes))
            self._steps.append((source, *self._choose(shapes[source])))
            shape = self._shape_of_last(shapes)
            if shape is None or not 0 < shape.numel() <= _MOST_ELEMENTS:
                self._steps.pop()
            else:
                shapes.append(shape)
        self._returned = sorted({len(shapes) - 1, self._draw.randrange(len(shapes) > 1, len(shapes))})

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Apply the steps, and return some of their results."""
        values = [x]
        for step in self._steps:
            values.append(self._apply(step, values))
        return tuple(values[number] for number in self._returned)

    def _apply(self, step: Step, values: Sequence[Tensor]) -> Tensor:
        source, function, layers = step
        return function(values[source], *(self._layers[name] for name in layers))

    def _shape_of_last(self, shapes: Sequence[torch.Size]) -> torch.Size | None:
        try:
            with torch.no_grad():
                return self.eval()._apply(self._steps[-1], [torch.zeros(shape) for shape in shapes]).shape
        except RuntimeError:  # this operator does not take this shape
            return None

    def _choose(self, shape: torch.Size) -> tuple[Callable[..., Tensor], Sequence[str]]:
        kinds = [*_operators(self._draw, len(shape)), *["layer"] * 12]
        kind = self._draw.choice(kinds)
        if kind != "layer":
            return kind, ()
        layer = self._reuse(*self._draw.choice(list(_layers(shape, self._draw))))
        how = self._draw.randrange(4) if self._normalized else 0
        if how < 2:
            return (lambda x, called: called(x)), (layer,)
        norm = self._reuse(f"norm {len(shape)} {shape[1]}", lambda: _norm(shape, affine=self._draw.random() < 0.8))
        if how == 2:
            return (lambda x, called: called(x)), (norm,)
        return (lambda x, called, after: after(called(x))), (layer, norm)

    def _reuse(self, kind: str, make: Callable[[], nn.Module]) -> str:
        """Return the name of a layer of a kind: one that there is, in half of the cases."""
        known = [name for name in self._layers if name.startswith(f"{kind} #")]
        if known and self._draw.random() < 0.5:
            return self._draw.choice(known)
        self._layers[f"{kind} #{len(self._layers)}"] = make()
        return f"{kind} #{len(self._layers) - 1}"


def _operators(draw: random.Random, dims: int) -> Iterator[Any]:
    low, high = draw.choice([(-1.0, 1.0), (0.0, 6.0), (-0.5, 2.0)])
    factor, addend = draw.choice([2.0, 0.5, -1.0]), draw.choice([1.0, -0.5])
    yield from (torch.relu, torch.sigmoid, torch.tanh, functional.gelu, lambda x: x + x.abs())
    yield from (lambda x: functional.hardtanh(x, low, high), lambda x: x * factor, lambda x: x + addend)
    yield from (lambda x: x[:, 1:], lambda x: torch.cat([x, x * 2], 1), lambda x: x.softmax(-1))
    if dims == 3:
        yield from (lambda x: x.transpose(1, 2), lambda x: x @ x.transpose(1, 2))
    if dims == 4:
        order = draw.choice([(0, 2, 3, 1), (0, 3, 1, 2), (0, 1, 3, 2)])
        yield from (lambda x: x.permute(order), lambda x: x.mean((2, 3), keepdim=True))
        yield from (lambda x: functional.max_pool2d(x, 3, 1, 1), lambda x: functional.avg_pool2d(x, 2, 1))
        yield lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        yield lambda x: functional.pad(x, (1, 1, 1, 1))


def _layers(shape: torch.Size, draw: random.Random) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yield layers that keep a shape: their kind, and what makes one."""
    channels, last, bias = shape[1], shape[-1], draw.random() < 0.6
    if len(shape) < 4:
        yield f"linear {last} {bias}", lambda: nn.Linear(last, last, bias=bias)
    if len(shape) > 2:
        plain, transposed = ((nn.Conv1d, nn.ConvTranspose1d), (nn.Conv2d, nn.ConvTranspose2d))[len(shape) - 3]
        groups = draw.choice([1, channels, *[2] * (channels % 2 == 0)])
        size = draw.choice([1, 3])
        how: dict[str, Any] = {"padding": size // 2, "groups": groups, "bias": bias}
        kind = f"{len(shape)} {channels} {size} {groups} {bias}"
        yield f"convolution {kind}", lambda: plain(channels, channels, size, **how)
        yield f"transposed {kind}", lambda: transposed(channels, channels, size, **how)
    if len(shape) == 4:
        yield f"prelu {channels}", lambda: nn.PReLU(channels, init=0.3)


def _norm(shape: torch.Size, *, affine: bool) -> nn.Module:
    norm: Any = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(shape[1], affine=affine)
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    if affine:
        norm.weight.data.uniform_(0.5, 1.5)
        norm.bias.data.uniform_(-1, 1)
    return norm
