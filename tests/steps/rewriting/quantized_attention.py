"""Random models with attention, quantised by ExecuTorch's XNNPACK recipes."""

from __future__ import annotations

import random
from typing import Any

import torch
from both_forms import Calls, variants
from quantized_models import quantize
from torch import nn
from torch.export import ExportedProgram
from torch.nn import functional as F


class Layers(nn.Module):
    """Linear layers, attention, a normalisation and a convolution, in a random order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        r = random.Random(seed)
        torch.manual_seed(seed)
        self.order = [r.choice(["linear", "attention", "norm", "conv", "views", "shared"]) for _ in range(3)]
        self.heads, self.causal, self.masked = r.choice([1, 2]), r.random() < 0.5, r.random() < 0.5
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8, bias=r.random() < 0.5)
        self.norm, self.conv = nn.LayerNorm(8), nn.Conv2d(2, 2, r.choice([3, 7]), padding=3, groups=r.choice([1, 2]))
        self.length = 4

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            x = getattr(self, f"_{name}")(x, mask)
        return self.one(x).view(x.shape[0], -1)

    def _linear(self, x: Any, mask: Any) -> Any:
        return torch.relu(self.one(x.view(-1, 8))).view(x.shape)

    def _attention(self, x: Any, mask: Any) -> Any:
        q, k = (
            layer(x).view(x.shape[0], -1, self.heads, 8 // self.heads).transpose(1, 2)
            for layer in (self.one, self.other)
        )
        chosen = mask if self.masked else None
        out = F.scaled_dot_product_attention(q, k, k, chosen, is_causal=self.causal and chosen is None)
        return out.transpose(1, 2).reshape(x.shape)

    def _norm(self, x: Any, mask: Any) -> Any:
        return self.norm(x) + x.mean(-1, keepdim=True)

    def _conv(self, x: Any, mask: Any) -> Any:
        return (
            self.conv(x.view(x.shape[0], 2, -1, 8))[:, :, :, :8]
            .reshape(x.shape[0], -1)[:, : x[0].numel()]
            .view(x.shape)
        )

    def _views(self, x: Any, mask: Any) -> Any:
        return self.other(x.permute(0, 2, 1).permute(0, 2, 1).reshape(-1, 8).reshape(x.shape)).clone() * 1.0

    def _shared(self, x: Any, mask: Any) -> Any:
        return self.one(x) + self.one(x) + torch.tanh(self.other(x)) * torch.tanh(self.other(x))


def make(seed: int) -> tuple[str, ExportedProgram, Calls]:
    """Make the program of a seed, with the inputs of several calls."""
    r = random.Random(seed)
    module = Layers(seed)
    call = (torch.randn(2, 4, 8), torch.rand(4, 4) < 0.7)
    dynamic = r.random() < 0.5
    program = quantize(module, call, dynamic)
    return f"{module.order}{' dynamic' * dynamic}", program, list(variants(call, r, 3))
