"""Real architectures with random weights (nothing is downloaded), small enough to lower in seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram, export

Built = tuple[torch.nn.Module, tuple[Any, ...]]


class _Call(torch.nn.Module):
    """A model behind positional tensor arguments and one tensor result."""

    def __init__(self, model: torch.nn.Module, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self.call(self.model, *inputs)


def mobilenet_v2() -> Built:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    model = MobileNetV2ForImageClassification(MobileNetV2Config(image_size=96, num_labels=10)).eval()
    return _Call(model, lambda m, x: m(pixel_values=x).logits), (torch.randn(1, 3, 96, 96),)


def vit(layers: int = 4) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 128}
    config = ViTConfig(image_size=64, num_labels=10, **sizes)
    return _Call(ViTForImageClassification(config).eval(), lambda m, x: m(pixel_values=x).logits), (
        torch.randn(1, 3, 64, 64),
    )


def wide_vit() -> Built:
    """A ViT whose layer norms the host computes as they are: those of fewer elements become other operators."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = ViTConfig(image_size=64, num_labels=10, **sizes)
    return _Call(ViTForImageClassification(config).eval(), lambda m, x: m(pixel_values=x).logits), (
        torch.randn(1, 3, 64, 64),
    )


def bert(layers: int = 2) -> Built:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=128
    )
    return _Call(BertModel(config).eval(), lambda m, x, k: m(input_ids=x, attention_mask=k).last_hidden_state), (
        torch.randint(0, 200, (1, 16)),
        torch.ones(1, 16, dtype=torch.long),
    )


def llama() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=200,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    return _Call(LlamaForCausalLM(config).eval(), lambda m, x: m(input_ids=x, use_cache=False).logits), (
        torch.randint(0, 200, (1, 16)),
    )


def whisper_encoder(layers: int = 2) -> Built:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=64, encoder_layers=layers, encoder_attention_heads=4, encoder_ffn_dim=128, max_source_positions=100
    )
    return _Call(WhisperEncoder(config).eval(), lambda m, x: m(input_features=x).last_hidden_state), (
        torch.randn(1, 80, 200),
    )


def convnext() -> Built:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 2, 1], image_size=64, num_labels=10)
    return _Call(ConvNextForImageClassification(config).eval(), lambda m, x: m(pixel_values=x).logits), (
        torch.randn(1, 3, 64, 64),
    )


def t5() -> Built:
    from transformers import T5Config, T5Model

    config = T5Config(vocab_size=200, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4)
    return _Call(T5Model(config).eval(), lambda m, x, y: m(input_ids=x, decoder_input_ids=y, use_cache=False)[0]), (
        torch.randint(0, 200, (1, 16)),
        torch.randint(0, 200, (1, 8)),
    )


MODELS: dict[str, Callable[[], Built]] = {
    "mobilenet_v2": mobilenet_v2,
    "vit": vit,
    "wide_vit": wide_vit,
    "bert": bert,
    "llama": llama,
    "whisper_encoder": whisper_encoder,
    "convnext": convnext,
    "t5": t5,
}


def build(name: str) -> Built:
    """Build a model with the same weights and inputs in every process."""
    torch.manual_seed(0)
    return MODELS[name]()


@functools.cache
def exported(name: str) -> tuple[torch.nn.Module, tuple[Any, ...], ExportedProgram]:
    """Return a model, its inputs and its program: the same ones for all tests of a process, as nothing changes them."""
    model, inputs = build(name)
    return model, inputs, export(model, inputs)
