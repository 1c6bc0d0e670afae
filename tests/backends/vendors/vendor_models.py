"""What is lowered for vendors: real architectures, small, with random weights; nothing is downloaded.

Each has one layer of what repeats, as vendors' compilers take minutes for more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from models import bert, mobilenet_v2, vit, whisper_encoder
from torch import nn
from vendor_shelf import Methods

Model = Callable[[], Methods]


def mlp() -> Methods:
    return {"forward": (nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval(), (torch.randn(1, 16),))}


def cnn() -> Methods:
    """Plain and depthwise convolutions, and both poolings."""
    layers = (
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )
    return {"forward": (nn.Sequential(*layers).eval(), (torch.randn(1, 3, 16, 16),))}


class Attention(nn.Module):
    """Attention with rotary positions over a cache `[1, heads, length, size]`, with as many heads for keys."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, heads, length, self.size))
        angles = torch.arange(length)[:, None] / 100 ** (torch.arange(self.size // 2) / self.size * 2)
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1))
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Attend from new positions `[n]` to all up to each."""

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(1, -1, self.heads, self.size).transpose(1, 2)

        def rotate(y: torch.Tensor) -> torch.Tensor:
            first, second = y.chunk(2, -1)
            return y * self.cos[positions] + torch.cat([-second, first], -1) * self.sin[positions]

        self.keys.index_copy_(2, positions, rotate(split(self.key(x))))
        self.values.index_copy_(2, positions, split(self.value(x)))
        seen = torch.arange(self.keys.shape[2]) <= positions[:, None]
        attended = nn.functional.scaled_dot_product_attention(
            rotate(split(self.query(x))), self.keys, self.values, attn_mask=seen
        )
        return self.out(attended.transpose(1, 2).flatten(2))


class Llama(nn.Module):
    """A decoder as Llama is: RMS norm, rotary positions, a gated network, and a cache."""

    def __init__(self, vocabulary: int = 64, width: int = 32, layers: int = 1, length: int = 16) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width)
        self.attentions = nn.ModuleList(Attention(width, 4, length) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers))
        self.gates, self.ups = (nn.ModuleList(nn.Linear(width, 64) for _ in range(layers)) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(64, width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, attention in enumerate(self.attentions):
            x = x + attention(self.norms[2 * number](x), positions)
            y = self.norms[2 * number + 1](x)
            x = x + self.downs[number](nn.functional.silu(self.gates[number](y)) * self.ups[number](y))
        return self.head(self.norm(x))


def cached_attention() -> Methods:
    return {"forward": (Attention(32, 4, 16).eval(), (torch.randn(1, 1, 32), torch.tensor([3])))}


def llama() -> Methods:
    """A prompt and one more token, with one cache."""
    model = Llama().eval()
    return {
        "prefill": (model, (torch.randint(0, 64, (1, 4)), torch.arange(4))),
        "decode": (model, (torch.randint(0, 64, (1, 1)), torch.tensor([4]))),
    }


class Squeezed(nn.Module):
    """A block of MobileNetV3: a depthwise convolution between two of one pixel, hard swish, squeeze and excitation."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.expand, self.deep = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, inner, 5, padding=2, groups=inner)
        self.squeeze, self.excite = nn.Conv2d(inner, 8, 1), nn.Conv2d(8, inner, 1)
        self.project, self.norms = nn.Conv2d(inner, width, 1), nn.ModuleList(map(nn.BatchNorm2d, (inner, inner, width)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.hardswish(self.norms[0](self.expand(x)))
        y = nn.functional.hardswish(self.norms[1](self.deep(y)))
        pooled = nn.functional.adaptive_avg_pool2d(y, 1)
        y = y * nn.functional.hardsigmoid(self.excite(torch.relu(self.squeeze(pooled))))
        return x + self.norms[2](self.project(y))


def mobilenet_v3() -> Methods:
    first = (nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.Hardswish())
    last = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 32), nn.Hardswish(), nn.Linear(32, 10))
    model = nn.Sequential(*first, Squeezed(16, 32), Squeezed(16, 48), *last).eval()
    return {"forward": (model, (torch.randn(1, 3, 32, 32),))}


class Residual(nn.Module):
    """Two convolutions beside one of one pixel."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, out, 3, stride, 1), nn.Conv2d(out, out, 3, padding=1)
        self.beside, self.norms = nn.Conv2d(width, out, 1, stride), nn.ModuleList(nn.BatchNorm2d(out) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[1](self.second(torch.relu(self.norms[0](self.first(x)))))
        return torch.relu(y + self.norms[2](self.beside(x)))


def resnet() -> Methods:
    first = (nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    last = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    model = nn.Sequential(*first, Residual(8, 8, 1), Residual(8, 16, 2), *last).eval()
    return {"forward": (model, (torch.randn(1, 3, 32, 32),))}


class Yolo(nn.Module):
    """As YOLO: SiLU, split and joined features, pooling beside itself, a finer level, boxes and classes of both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.inner, self.joined = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(24, 16, 1)
        self.pooled, self.fine = nn.Conv2d(48, 16, 1), nn.Conv2d(24, 16, 3, padding=1)
        self.heads = nn.ModuleList(nn.Conv2d(16, 4 + 3, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        silu, pool = nn.functional.silu, nn.functional.max_pool2d
        fine = silu(self.stem(x))
        first, second = silu(self.down(fine)).chunk(2, 1)
        coarse = silu(self.joined(torch.cat([first, second, second + silu(self.inner(second))], 1)))
        once = pool(coarse, 5, 1, 2)
        coarse = silu(self.pooled(torch.cat([coarse, once, pool(once, 5, 1, 2)], 1)))
        fine = silu(self.fine(torch.cat([fine, nn.functional.interpolate(coarse, scale_factor=2)], 1)))
        found = torch.cat([head(y).flatten(2) for head, y in zip(self.heads, (fine, coarse), strict=True)], 2)
        boxes, classes = found.split([4, 3], 1)
        return boxes, classes.sigmoid()


def yolo() -> Methods:
    return {"forward": (Yolo().eval(), (torch.randn(1, 3, 32, 32),))}


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(x)[0])


def lstm() -> Methods:
    return {"forward": (Lstm().eval(), (torch.randn(1, 4, 16),))}


class Mixture(nn.Module):
    """A mixture: of four networks, the two that a gate prefers count."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(16, 4), nn.Linear(16, 8)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(self.gate(x).softmax(-1), 2)
        share = ((chosen[..., None] == torch.arange(4)) * weights[..., None]).sum(-2)
        return self.out(sum(expert(x) * share[..., n, None] for n, expert in enumerate(self.experts)))


def mixture() -> Methods:
    return {"forward": (Mixture().eval(), (torch.randn(1, 4, 16),))}


SMALL: Mapping[str, Model] = {"mlp": mlp, "cnn": cnn, "cached_attention": cached_attention}
NIGHTLY: Mapping[str, Model] = {
    "mobilenet_v2": lambda: {"forward": mobilenet_v2()},
    "mobilenet_v3": mobilenet_v3,
    "resnet": resnet,
    "vit": lambda: {"forward": vit(layers=1)},
    "bert": lambda: {"forward": bert(layers=1)},
    "whisper_encoder": lambda: {"forward": whisper_encoder(layers=1)},
    "llama": llama,
    "lstm": lstm,
    "yolo": yolo,
    "mixture": mixture,
}
MODELS: Mapping[str, Model] = {**SMALL, **NIGHTLY}


def build(name: str) -> Methods:
    """Build a model with the same weights and inputs each time."""
    torch.manual_seed(0)
    return MODELS[name]()
