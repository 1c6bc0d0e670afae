"""Models whose memory depends on several sizes together: windows of an image, tokens of a batch, a length from data."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

F = nn.functional

_WINDOW = 8


class Windows(nn.Module):
    """Attention in windows of an image of any size, as Swin has it: padded to whole windows, and cropped."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.stem, self.qkv = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, 3 * width)
        self.mix, self.head, self.heads = nn.Linear(width, width), nn.Conv2d(width, 3, 3, padding=1), heads

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image).permute(0, 2, 3, 1)
        batch, height, width, channels = x.shape
        down, right = ((size + _WINDOW - 1) // _WINDOW * _WINDOW - size for size in (height, width))
        x = F.pad(x, (0, 0, 0, right, 0, down))
        rows, columns = (height + down) // _WINDOW, (width + right) // _WINDOW
        windows = x.view(batch, rows, _WINDOW, columns, _WINDOW, channels).permute(0, 1, 3, 2, 4, 5)
        windows = windows.reshape(-1, _WINDOW * _WINDOW, channels)
        q, k, v = (
            one.reshape(one.shape[0], _WINDOW * _WINDOW, self.heads, -1).transpose(1, 2)
            for one in self.qkv(windows).chunk(3, -1)
        )
        mixed = ((q @ k.transpose(-1, -2)) * 0.3).softmax(-1) @ v
        windows = windows + self.mix(mixed.transpose(1, 2).reshape(windows.shape))
        x = windows.view(batch, rows, columns, _WINDOW, _WINDOW, channels).permute(0, 1, 3, 2, 4, 5)
        x = x.reshape(batch, height + down, width + right, channels)[:, :height, :width]
        return self.head(x.permute(0, 3, 1, 2)) + image


class Encoder(nn.Module):
    """A text encoder with a mask, for any number of texts of any length."""

    def __init__(self, width: int = 32, longest: int = 512) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(100, width), nn.Embedding(longest, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, activation="gelu")

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1]))
        added = (1.0 - mask[:, None, :].float()) * -1e4
        layer = self.layer
        q, k, v = (
            one.reshape(*tokens.shape, 4, -1).transpose(1, 2)
            for one in F.linear(x, layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, added[:, None]).transpose(1, 2).reshape(x.shape)
        x = layer.norm1(x + layer.self_attn.out_proj(mixed))
        return layer.norm2(x + layer.linear2(F.gelu(layer.linear1(x))))


class Speech(nn.Module):
    """Text to speech as Kokoro does it: how long each token sounds is predicted, so the length depends on data."""

    def __init__(self, width: int = 16, hop: int = 20) -> None:
        super().__init__()
        self.embedding, self.duration = nn.Embedding(50, width), nn.Linear(width, 1)
        self.decoder, self.wave = nn.Conv1d(width, width, 5, padding=2), nn.ConvTranspose1d(width, 1, hop, hop)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)[0]
        lasting = (self.duration(x)[:, 0].sigmoid() * 8).round().long().clamp(min=1)
        length = lasting.sum().item()
        torch._check(length >= 1)
        frames = (torch.arange(length)[:, None] >= lasting.cumsum(0)[None]).long().sum(1)
        return self.wave(self.decoder(x[frames].transpose(0, 1)[None]).relu())[0, 0].tanh()


class Kokoro(nn.Module):
    """Text to speech as Kokoro is: an encoder of texts with attention, durations, a decoder that upsamples."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.near = nn.Embedding(50, width), nn.Conv1d(width, width, 5, padding=2)
        self.qkv, self.mix, self.duration = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, 1)
        self.decoder = nn.Sequential(
            *(nn.Conv1d(width, width, 5, padding=2), nn.ReLU(), nn.ConvTranspose1d(width, width, 8, 4, 2), nn.ReLU()),
            *(nn.Conv1d(width, width // 2, 3, padding=1), nn.ReLU(), nn.ConvTranspose1d(width // 2, 8, 8, 4, 2)),
            *(nn.ReLU(), nn.Conv1d(8, 1, 7, padding=3), nn.Tanh()),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.near(self.embedding(tokens).transpose(1, 2)).relu().transpose(1, 2)
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        x = (x + self.mix(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))[0]
        lasting = (self.duration(x)[:, 0].sigmoid() * 8).round().long().clamp(min=1)
        length = lasting.sum().item()
        torch._check(length >= 1)
        frames = (torch.arange(length)[:, None] >= lasting.cumsum(0)[None]).long().sum(1)
        return self.decoder(x[frames].transpose(0, 1)[None])[0, 0]


class Detector(nn.Module):
    """Convolutions to three strides, and what each place of each of them says."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.ReLU()) for a, b in ((3, width), (width, width), (width, width))
        )
        self.heads = nn.ModuleList(nn.Conv2d(width, 6, 1) for _ in range(3))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        found: list[Any] = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            image = stage(image)
            found.append(head(image).flatten(2))
        return torch.cat(found, 2).transpose(1, 2).sigmoid()
