"""Real architectures for torch.compile, as users call them, as small as their libraries let them be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Case:
    """A model and what it is called with.

    Attributes:
        model: The model.
        run: Calls it, or what was compiled of it, as often as a user would, and returns all results.
    """

    model: torch.nn.Module
    run: Callable[[Callable[..., Any]], Sequence[torch.Tensor]]

    def loss(self, called: Callable[..., Any]) -> torch.Tensor:
        """Return how far the results are from what they are trained to be."""
        results = self.run(called)
        targets = [torch.arange(value.numel(), dtype=value.dtype).cos().view_as(value) for value in results]
        pairs = zip(results, targets, strict=True)
        return torch.stack([torch.nn.functional.mse_loss(value, target) for value, target in pairs]).sum()


class _Logits(torch.nn.Module):
    """A model of transformers that returns one tensor."""

    def __init__(self, model: torch.nn.Module, name: str = "logits") -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, **inputs: Any) -> torch.Tensor:
        return getattr(self.model(**inputs), self.name)


def mobilenet_v2() -> Case:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(image_size=64, num_labels=10, depth_multiplier=0.35, classifier_dropout_prob=0.1)
    model = MobileNetV2ForImageClassification(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):  # as it is made, its results are too small to compare
            torch.nn.init.kaiming_normal_(module.weight)
    image = torch.randn(4, 3, 64, 64)
    return Case(_Logits(model), lambda called: [called(pixel_values=image.to(model.dtype))])


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32, num_labels=10
    )
    image = torch.randn(2, 3, 32, 32)
    model = ViTForImageClassification(config)
    return Case(_Logits(model), lambda called: [called(pixel_values=image.to(model.dtype))])


def bert() -> Case:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    words = torch.randint(0, 200, (2, 12))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 7:] = 0
    model = _Logits(BertModel(config), "last_hidden_state")
    return Case(model, lambda called: [called(input_ids=words, attention_mask=mask)])


def _llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=200,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def llama() -> Case:
    words = torch.randint(0, 200, (2, 12))
    return Case(_Logits(_llama()), lambda called: [called(input_ids=words, use_cache=False)])


def llama_with_cache() -> Case:
    """Read four words, then one after the other, each call writing into the cache."""
    from transformers import StaticCache

    model = _llama()
    words = torch.randint(0, 200, (1, 8))

    def run(called: Callable[..., Any]) -> Sequence[torch.Tensor]:
        cache = StaticCache(config=model.config, max_cache_len=16)
        results, start = [], 0
        for end in (4, 5, 6, 7, 8):
            given = words[:, start:end]
            positions = torch.arange(start, end)
            results.append(called(input_ids=given, past_key_values=cache, position_ids=positions[None]))
            start = end
        return [*results, *(layer.keys for layer in cache.layers), *(layer.values for layer in cache.layers)]

    return Case(_Logits(model), run)


class _Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.lstm = torch.nn.LSTM(16, 24, num_layers=2, batch_first=True, bidirectional=True)
        self.head = torch.nn.Linear(48, 10)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(words))[0])


def lstm() -> Case:
    words = torch.randint(0, 50, (2, 5))
    return Case(_Recurrent(), lambda called: [called(words)])


CASES: dict[str, Callable[[], Case]] = {
    "mobilenet_v2": mobilenet_v2,
    "vit": vit,
    "bert": bert,
    "llama": llama,
    "llama_with_cache": llama_with_cache,
    "lstm": lstm,
}


def build(name: str) -> Case:
    """Build a model with the same weights and inputs each time."""
    torch.manual_seed(0)
    return CASES[name]()
