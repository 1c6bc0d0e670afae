"""The models of the latency benchmark: real architectures and sizes with random weights, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lowering_models import Built, Cached, Call, quantize
from torch import nn
from torch.export import Dim

TOKENS = 128
"""The length of a text."""

_PADDED = 32
"""How many of them the attention mask leaves out."""


def draw_tokens(length: int = TOKENS, vocabulary: int = 30000) -> torch.Tensor:
    """Return one text."""
    return torch.randint(1, vocabulary, (1, length))


def _mask() -> torch.Tensor:
    return (torch.arange(TOKENS) < TOKENS - _PADDED).to(torch.long)[None]


def _settle(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Give batch normalisations the statistics of some inputs: with those of a new model the outputs are nearly 0."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # the average of all calls
        norm.reset_running_stats()
        norm.train()
    with torch.no_grad():
        model(*(torch.randn(4, *one.shape[1:]) for one in inputs))
    model.eval()


def classifier(name: str, **config: Any) -> Built:
    """Build one of transformers' image classifiers, for 224 x 224 pixels and 1000 classes."""
    import transformers

    made = getattr(transformers, f"{name}Config")(num_labels=1000, **config)
    model = getattr(transformers, f"{name}ForImageClassification")(made).eval()
    return for_images(Call(model, lambda m, x: m(pixel_values=x).logits))


def for_images(model: nn.Module) -> Built:
    """Give a model an image of 224 x 224 pixels, and the statistics of some."""
    inputs = (torch.randn(1, 3, 224, 224),)
    _settle(model.eval(), inputs)
    return Built(model, inputs)


def _encoder(model: nn.Module, dynamic: bool = False) -> Built:
    """Build a text encoder with an attention mask."""
    call = Call(model.eval(), lambda m, x, mask: m(input_ids=x, attention_mask=mask).last_hidden_state)
    axes = {1: Dim("length", min=2, max=512)}
    return Built(call, (draw_tokens(), _mask()), ((axes, axes),) if dynamic else None)


def _bert(layers: int, width: int, heads: int, dynamic: bool = False) -> Built:
    from transformers import BertConfig, BertModel

    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return _encoder(BertModel(BertConfig(intermediate_size=4 * width, **sizes)), dynamic)


def whisper_encoder() -> Built:
    """Build the encoder of Whisper-tiny, for 30 seconds."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536)
    model = WhisperEncoder(config).eval()
    return Built(Call(model, lambda m, x: m(input_features=x).last_hidden_state), (torch.randn(1, 80, 3000),))


def resnet18() -> Built:
    """Build ResNet-18."""
    return classifier("ResNet", layer_type="basic", hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2])


def vit_tiny() -> Built:
    """Build ViT-tiny."""
    return classifier("ViT", hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768)


def distilbert() -> Built:
    """Build DistilBERT."""
    from transformers import DistilBertConfig, DistilBertModel

    return _encoder(DistilBertModel(DistilBertConfig()))


def clip_text() -> Built:
    """Build the text tower of CLIP ViT-B/32."""
    from transformers import CLIPTextConfig, CLIPTextModel

    model = CLIPTextModel(CLIPTextConfig(eos_token_id=49407)).eval()
    return Built(Call(model, lambda m, x: m(input_ids=x).last_hidden_state), (draw_tokens(77),))


def clip_vision() -> Built:
    """Build the vision tower of CLIP ViT-B/32."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    model = CLIPVisionModel(CLIPVisionConfig()).eval()
    return Built(Call(model, lambda m, x: m(pixel_values=x).last_hidden_state), (torch.randn(1, 3, 224, 224),))


def t5_encoder() -> Built:
    """Build the encoder of T5-small."""
    from transformers import T5Config, T5EncoderModel

    return _encoder(T5EncoderModel(T5Config()))


def llama_model() -> nn.Module:
    """Build a Llama of 6 layers with two heads for each one of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1376,
        max_position_embeddings=256,
    )
    # ExecuTorch cannot convert a program that writes values with gradients into a buffer.
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def llama(tokens: int) -> Built:
    """Build that Llama with a cache for 256 tokens."""
    return Built(
        Cached(llama_model(), heads=4, width=64, length=256), (draw_tokens(tokens, 8000), torch.arange(tokens))
    )


class _Excite(nn.Module):
    """Squeeze and excite."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = _rounded(width / 4)
        self.layers = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(width, inner, 1),
            nn.ReLU(),
            nn.Conv2d(inner, width, 1),
            nn.Hardsigmoid(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.layers(x)


class _Residual(nn.Module):
    """An inverted residual."""

    def __init__(self, width: int, kernel: int, inner: int, out: int, excite: bool, hard: bool, stride: int) -> None:
        super().__init__()
        self.adds = stride == 1 and width == out
        self.layers = nn.Sequential(
            *(_convolution(width, inner, 1, 1, 1, hard) if inner != width else ()),
            *_convolution(inner, inner, kernel, stride, inner, hard),
            *((_Excite(inner),) if excite else ()),
            nn.Conv2d(inner, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


def _rounded(width: float) -> int:
    return max(8, int(width + 4) // 8 * 8)


def _convolution(width: int, out: int, kernel: int, stride: int, groups: int, hard: bool) -> Sequence[nn.Module]:
    convolution = nn.Conv2d(width, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return convolution, nn.BatchNorm2d(out), nn.Hardswish() if hard else nn.ReLU()


_MOBILENET_V3 = (  # kernel, inner width, width, squeeze and excite, hard swish, stride: table 1 of arXiv:1905.02244
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)


def mobilenet_v3() -> Built:
    """Build MobileNetV3-Large."""
    layers: list[nn.Module] = [*_convolution(3, 16, 3, 2, 1, True)]
    width = 16
    for kernel, inner, out, excite, hard, stride in _MOBILENET_V3:
        layers.append(_Residual(width, kernel, inner, out, excite, hard, stride))
        width = out
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(960, 1280), nn.Hardswish(), nn.Linear(1280, 1000))
    return for_images(nn.Sequential(*layers, *_convolution(width, 960, 1, 1, 1, True), *head))


def efficientnet_b0() -> Built:
    """Build EfficientNet-B0."""
    return classifier("EfficientNet", image_size=224, hidden_dim=1280, width_coefficient=1.0, depth_coefficient=1.0)


def _int8(built: Built) -> Built:
    return Built(built.model, built.inputs, quantize=quantize)


TRANSFORMERS: dict[str, Callable[[], Built]] = {
    "whisper_encoder": whisper_encoder,
    "vit_tiny": vit_tiny,
    "minilm": lambda: _bert(6, 384, 12),
    "bert_mini": lambda: _bert(4, 256, 4),
    "distilbert": distilbert,
    "clip_text": clip_text,
    "clip_vision": clip_vision,
    "t5_encoder": t5_encoder,
    "swin_tiny": lambda: classifier("Swin"),
    "llama_prefill": lambda: llama(64),
    "llama_decode": lambda: llama(1),
}
"""The models whose geometric mean counts."""

CONVOLUTIONAL: dict[str, Callable[[], Built]] = {
    "mobilenet_v2": lambda: classifier("MobileNetV2"),
    "mobilenet_v3": mobilenet_v3,
    "resnet18": resnet18,
    "resnet50": lambda: classifier("ResNet"),
    "convnext_tiny": lambda: classifier("ConvNext"),
    "efficientnet_b0": efficientnet_b0,
}

OTHERS: dict[str, Callable[[], Built]] = {
    "mobilenet_v2_int8": lambda: _int8(classifier("MobileNetV2")),
    "vit_tiny_int8": lambda: _int8(vit_tiny()),
    "resnet50_int8": lambda: _int8(classifier("ResNet")),
    "bert_mini_dynamic": lambda: _bert(4, 256, 4, dynamic=True),
}
"""Quantised models, and one for any length of text."""

MODELS = {**TRANSFORMERS, **CONVOLUTIONAL, **OTHERS}
