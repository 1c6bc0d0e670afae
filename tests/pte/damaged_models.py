"""Models whose files have much that can be damaged: many kernels, state, control flow, many nodes of XNNPACK."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Operators(nn.Module):
    """Kernels of many kinds: on floats, integers and bools, with lists, and with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear, self.norm = nn.Embedding(7, 6), nn.Linear(6, 4), nn.LayerNorm(4)
        self.conv = nn.Conv1d(3, 2, 2)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> Any:
        y = self.norm(self.linear(self.table(index + 1)))
        left, right = y.split(2, dim=-1)
        y = torch.cat([left.clamp(-1, 1), right.softmax(-1)], dim=-1)
        z = self.conv(y).mean(-1, keepdim=True).expand(-1, -1, 4)
        top, where = z.topk(2)
        picked = x[index % 2, :, None]
        return torch.where(x > 0, x, x.sum()), top.transpose(1, 2), where, picked.pow(2).amax(), x.to(torch.int32)


class Steps(nn.Module):
    """State, shapes of any size, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.arange(3.0))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        self.total.add_(x.sum(0))
        y = torch.cond(x.sum() > 0, lambda v: self.linear(v) + 1, lambda v: v * 3, (x,))
        return (x * y).reshape(-1) * 2, torch.cumsum(y, 0) + self.total


class Loop(nn.Module):
    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        from functorch.experimental.control_flow import map

        return map(lambda x, y: x * y + 1, xs, xs[0].clone())


class Net(nn.Module):
    """What convolutional networks are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.deep = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, groups=4, stride=2)
        self.up, self.pool, self.act = nn.ConvTranspose2d(4, 2, 2, stride=2), nn.MaxPool2d(2), nn.PReLU(2)
        self.linear, self.norm = nn.Linear(8, 5), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pool(self.act(self.up(torch.relu(self.norm(self.deep(self.conv(x)))))))
        y = torch.cat([y.mean((2, 3)), nn.functional.pad(y, (0, 1)).flatten(1)[:, :6]], 1)
        return torch.softmax(self.linear(y), -1)


class Attention(nn.Module):
    """What transformers are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.first(x).reshape(2, 4, 3, 8).unbind(2)
        y = torch.softmax(q @ k.transpose(1, 2) / 8, -1) @ v
        return nn.functional.gelu(self.second(y)) + torch.tanh(x) * torch.sigmoid(y) - x.abs().sqrt().clamp(0, 2)
