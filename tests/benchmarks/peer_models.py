"""The models of the comparisons with other runtimes: at real widths, cut in depth so that all convert them quickly.

Random weights, batch 1; nothing is downloaded. Inputs and outputs are tensors of fixed sizes, and state is passed in
and out, because not all of the runtimes keep any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from latency_models import TRANSFORMERS as _LATENCY, classifier, draw_tokens, for_images, llama_model
from lowering_models import Built, Call
from torch import nn
from torch.nn import functional as F

_CACHED = 255
"""The tokens that a cache holds."""


def siglip() -> Built:
    """Build the vision tower of SigLIP-B/16, with 2 of 12 layers."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    model = SiglipVisionModel(SiglipVisionConfig(num_hidden_layers=2)).eval()
    return Built(Call(model, lambda m, x: m(pixel_values=x).pooler_output), (torch.randn(1, 3, 224, 224),))


def opt() -> Built:
    """Build the decoder of OPT-125M, with 4 of 12 layers, for 64 tokens."""
    from transformers import OPTConfig, OPTForCausalLM

    model = OPTForCausalLM(OPTConfig(vocab_size=8000, num_hidden_layers=4, max_position_embeddings=256)).eval()
    return Built(Call(model, lambda m, x: m(input_ids=x, use_cache=False).logits), (draw_tokens(64, 8000),))


def llama() -> Built:
    """Build a Llama with two heads for each one of keys and values, for 64 tokens."""
    return Built(Call(llama_model(), lambda m, x: m(input_ids=x, use_cache=False).logits), (draw_tokens(64, 8000),))


def _step(model: Any, token: torch.Tensor, position: torch.Tensor, *cached: torch.Tensor) -> tuple[torch.Tensor, ...]:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    pairs = list(zip(cached[::2], cached[1::2], strict=True))
    for layer, (keys, values) in enumerate(pairs):
        cache.update(keys, values, layer)
    arguments = {"position_ids": position, "past_key_values": cache, "use_cache": True}
    logits = model(token, **arguments).logits
    new = [state[:, :, -1:] for layer in cache.layers for state in (layer.keys, layer.values)]
    return logits, *new


def decode() -> Built:
    """Build a step of that Llama: one token after 255, whose keys and values are inputs; its own are outputs."""
    model = llama_model()
    config = model.config
    sizes = (1, config.num_key_value_heads, _CACHED, config.head_dim)
    cached = (torch.randn(sizes) for _ in range(2 * config.num_hidden_layers))
    return Built(Call(model, _step), (draw_tokens(1, 8000), torch.tensor([[_CACHED]]), *cached))


def whisper() -> Built:
    """Build the encoder of Whisper-tiny, with 2 of 4 layers, for 10 seconds."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    sizes = {"d_model": 384, "encoder_layers": 2, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536}
    model = WhisperEncoder(WhisperConfig(max_source_positions=500, **sizes)).eval()
    return Built(Call(model, lambda m, x: m(input_features=x).last_hidden_state), (torch.randn(1, 80, 1000),))


class _Recogniser(nn.Module):
    """Convolutions over time, two layers of LSTM, and characters."""

    def __init__(self, width: int = 384) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(80, width, 5, 2, 2), nn.ReLU(), nn.Conv1d(width, width, 5, 2, 2), nn.ReLU()
        )
        self.cells = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logarithms of the characters' probabilities."""
        return F.log_softmax(self.head(self.cells(self.convolutions(x).transpose(1, 2))[0]), -1)


def lstm() -> Built:
    """Build a speech recogniser with two layers of LSTM of 384, for 48 frames."""
    return Built(_Recogniser().eval(), (torch.randn(1, 80, 48),))


def _convolution(width: int, out: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(width, out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(out), nn.SiLU())


class _Block(nn.Module):
    """Half of the channels goes through residual blocks, and what each makes is kept."""

    def __init__(self, width: int, out: int, blocks: int, adds: bool = True) -> None:
        super().__init__()
        half, self.adds = out // 2, adds
        self.first = _convolution(width, out, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(_convolution(half, half), _convolution(half, half)) for _ in range(blocks)
        )
        self.last = _convolution((2 + blocks) * half, out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [*self.first(x).chunk(2, 1)]
        for block in self.blocks:
            made = block(parts[-1])
            parts.append(parts[-1] + made if self.adds else made)
        return self.last(torch.cat(parts, 1))


class _Detector(nn.Module):
    """A detector of the kind of YOLOv8-n: three sizes of features, joined downwards and upwards, a head for each."""

    def __init__(self, classes: int = 80) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _convolution(3, 16, 3, 2), _convolution(16, 32, 3, 2), _Block(32, 32, 1), _convolution(32, 64, 3, 2)
        )
        self.small = _Block(64, 64, 2)
        self.middle = nn.Sequential(_convolution(64, 128, 3, 2), _Block(128, 128, 2))
        self.large = nn.Sequential(_convolution(128, 256, 3, 2), _Block(256, 256, 1))
        self.pools = nn.ModuleList([nn.MaxPool2d(5, 1, 2) for _ in range(3)])
        self.pooled = _convolution(4 * 256, 256, 1)
        self.down = nn.ModuleList([_Block(256 + 128, 128, 1, False), _Block(128 + 64, 64, 1, False)])
        self.strides = nn.ModuleList([_convolution(64, 64, 3, 2), _convolution(128, 128, 3, 2)])
        self.up = nn.ModuleList([_Block(64 + 128, 128, 1, False), _Block(128 + 256, 256, 1, False)])
        heads = ((64, _convolution(width, 64)) for width in (64, 128, 256))
        self.heads = nn.ModuleList(nn.Sequential(one, nn.Conv2d(width, 4 + classes, 1)) for width, one in heads)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return for each cell of the three grids a box and the classes' probabilities."""
        small = self.small(self.stem(image))
        middle = self.middle(small)
        levels = [self.large(middle)]
        for pool in self.pools:
            levels.append(pool(levels[-1]))
        large = self.pooled(torch.cat(levels, 1))
        middle = self.down[0](torch.cat([F.interpolate(large, scale_factor=2.0), middle], 1))
        small = self.down[1](torch.cat([F.interpolate(middle, scale_factor=2.0), small], 1))
        middle = self.up[0](torch.cat([self.strides[0](small), middle], 1))
        large = self.up[1](torch.cat([self.strides[1](middle), large], 1))
        found = [head(x).flatten(2) for head, x in zip(self.heads, (small, middle, large), strict=True)]
        box, classes = torch.cat(found, 2).split([4, found[0].shape[1] - 4], 1)
        return torch.cat([box, classes.sigmoid()], 1)


def detector() -> Built:
    """Build a detector for 320 x 320 pixels."""
    built = for_images(_Detector())
    return Built(built.model, (torch.randn(1, 3, 320, 320),))


TRANSFORMERS: dict[str, Callable[[], Built]] = {
    "minilm": _LATENCY["minilm"],
    "vit_s": lambda: classifier(
        "ViT", hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536
    ),
    "siglip": siglip,
    "opt": opt,
    "llama": llama,
    "decode": decode,
    "whisper": whisper,
}

OTHERS: dict[str, Callable[[], Built]] = {
    "lstm": lstm,
    "mobilenet_v2": lambda: classifier("MobileNetV2"),
    "convnext": lambda: classifier("ConvNext", depths=[2, 2, 4, 2]),
    "resnet50": lambda: classifier("ResNet"),
    "detector": detector,
}

MODELS = {**TRANSFORMERS, **OTHERS}
