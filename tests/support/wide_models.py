"""Models whose memory is planned, with inputs."""

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
        Decoder: (torch.randn(1, 1, 32), torch.tensor([3])),
        Recurrent: (torch.randn(1, 6, 8),),
    }[kind]
    return kind().eval(), inputs
