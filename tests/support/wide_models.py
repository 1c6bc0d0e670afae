"""Models with many branches, and others whose memory is planned; with inputs. The net has some of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...]]


class Experts(nn.Module):
    """All experts compute before any is used, as a mixture of experts is often written."""

    def __init__(self, experts: int = 8, wide: int = 256) -> None:
        super().__init__()
        self.gate = nn.Linear(64, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, wide), nn.GELU(), nn.Linear(wide, 64)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.gate(x).softmax(-1)
        made = [expert(x) for expert in self.experts]
        total = share[..., :1] * made[0]
        for i, one in enumerate(made[1:], 1):
            total = total + share[..., i : i + 1] * one
        return total


class Detector(nn.Module):
    """A feature pyramid with two heads for each of its levels."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 64, 128, 256)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, after, 3, 2, 1), nn.ReLU())
            for before, after in zip((3, *widths), widths, strict=False)
        )
        self.laterals = nn.ModuleList(nn.Conv2d(width, 64, 1) for width in widths)
        self.smooth = nn.ModuleList(nn.Conv2d(64, 64, 3, 1, 1) for _ in widths)
        self.classes = nn.Sequential(nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU(), nn.Conv2d(64, 90, 3, 1, 1))
        self.boxes = nn.Sequential(nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU(), nn.Conv2d(64, 36, 3, 1, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        levels = [lateral(level) for lateral, level in zip(self.laterals, levels, strict=True)]
        for above in (2, 1, 0):
            levels[above] = levels[above] + nn.functional.interpolate(levels[above + 1], scale_factor=2.0)
        levels = [smooth(level) for smooth, level in zip(self.smooth, levels, strict=True)]
        classes = torch.cat([self.classes(level).flatten(2) for level in levels], 2)
        return classes, torch.cat([self.boxes(level).flatten(2) for level in levels], 2)


class Dense(nn.Module):
    """Each layer reads what all before it made, as in DenseNet."""

    def __init__(self, layers: int = 8, growth: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(64 + growth * i, 4 * growth, 1), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, 1, 1))
            for i in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [x]
        for layer in self.layers:
            made.append(layer(torch.cat(made, 1)))
        return torch.cat(made, 1).mean((2, 3))


class UNet(nn.Module):
    """Goes down and up again, with what was kept on the way down."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sizes = [width << i for i in range(4)]
        self.down = nn.ModuleList(
            nn.Conv2d(before, after, 3, 1, 1) for before, after in zip([3, *sizes], sizes, strict=False)
        )
        self.up = nn.ModuleList(nn.Conv2d(3 * size, size, 3, 1, 1) for size in sizes[:3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for i, conv in enumerate(self.down):
            x = torch.relu(conv(x))
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2) if i < 3 else x
        for i in (2, 1, 0):
            x = torch.cat([nn.functional.interpolate(x, scale_factor=2.0), kept[i]], 1)
            x = torch.relu(self.up[i](x))
        return x


class Inception(nn.Module):
    """Four branches from one value, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(192, 64, 1)
        self.three = nn.Sequential(nn.Conv2d(192, 96, 1), nn.ReLU(), nn.Conv2d(96, 128, 3, 1, 1))
        self.five = nn.Sequential(nn.Conv2d(192, 16, 1), nn.ReLU(), nn.Conv2d(16, 32, 5, 1, 2))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(192, 32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1))


class Decoder(nn.Module):
    """A layer of a language model, with a cache of keys and values that is written in place."""

    def __init__(self, width: int = 32, length: int = 64) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, length, width))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        self.keys.index_copy_(1, position, key)
        self.values.index_copy_(1, position, value)
        mask = torch.arange(self.keys.shape[1]) <= position[:, None]
        scores = (query @ self.keys.transpose(1, 2) / 6.0).masked_fill(~mask, -1e9)
        x = x + self.out(scores.softmax(-1) @ self.values)
        return x + self.down(nn.functional.gelu(self.up(x)))


class Recurrent(nn.Module):
    """An LSTM over both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True, bidirectional=True), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


def build(kind: type[nn.Module]) -> Built:
    """Make a model with the same weights and inputs each time."""
    torch.manual_seed(0)
    inputs = {
        Experts: (torch.randn(1, 64, 64),),
        Detector: (torch.randn(1, 3, 64, 64),),
        Dense: (torch.randn(1, 64, 28, 28),),
        UNet: (torch.randn(1, 3, 64, 64),),
        Inception: (torch.randn(1, 192, 28, 28),),
        Decoder: (torch.randn(1, 1, 32), torch.tensor([3])),
        Recurrent: (torch.randn(1, 6, 8),),
    }[kind]
    return kind().eval(), inputs
