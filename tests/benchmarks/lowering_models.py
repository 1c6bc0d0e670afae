"""The models of the lowering benchmark: real architectures with random weights, nothing is downloaded.

Their layers are narrow, as the time to lower a program depends on the size of its graph and hardly on its weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

VOCABULARY = 500


@dataclass(frozen=True)
class Built:
    """What is exported.

    Attributes:
        model: The module.
        inputs: Its inputs.
        dynamic_shapes: As for `torch.export.export`.
        quantize: Turns the module and its inputs into a program; None exports it.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    dynamic_shapes: Any = None
    quantize: Callable[[nn.Module, tuple[Any, ...]], ExportedProgram] | None = None


class Call(nn.Module):
    """A model behind positional arguments and tensor results."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *inputs: Any) -> Any:
        """Call the model."""
        return self.call(self.model, *inputs)


def _tokens(length: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length))


def _image(size: int = 64) -> tuple[torch.Tensor, ...]:
    return (torch.randn(1, 3, size, size),)


def _classifier(name: str, image: int = 64, **config: Any) -> Built:
    """Build one of transformers' image classifiers."""
    import transformers

    made = getattr(transformers, f"{name}Config")(num_labels=10, **config)
    model = getattr(transformers, f"{name}ForImageClassification")(made).eval()
    return Built(Call(model, lambda m, x: m(pixel_values=x).logits), _image(image))


def _encoder(config: Any, model: type, length: int = 32, dynamic: bool = False) -> Built:
    """Build a text encoder with an attention mask."""
    call = Call(model(config).eval(), lambda m, x, mask: m(input_ids=x, attention_mask=mask).last_hidden_state)
    inputs = (_tokens(length), torch.ones(1, length, dtype=torch.long))
    axes = {1: Dim("length", min=2, max=128)}
    return Built(call, inputs, ((axes, axes),) if dynamic else None)


def _decoder(name: str, length: int = 16, **config: Any) -> Built:
    """Build a causal language model without a cache."""
    import transformers

    made = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **config)
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    return Built(Call(model, lambda m, x: m(input_ids=x, use_cache=False).logits), (_tokens(length),))


def _bert(layers: int, width: int, heads: int, **config: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(
        **{"vocab_size": VOCABULARY} | config,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
    )


def mobilenet_v2() -> Built:
    """Build MobileNetV2."""
    return _classifier("MobileNetV2", 96, image_size=96)


def resnet50() -> Built:
    """Build ResNet-50, with few channels."""
    return _classifier("ResNet", embedding_size=16, hidden_sizes=[32, 64, 128, 256], depths=[3, 4, 6, 3])


def vit_tiny() -> Built:
    """Build ViT-tiny: 12 layers."""
    sizes = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
    return _classifier("ViT", image_size=64, **sizes)


def bert_mini() -> Built:
    """Build BERT-mini: 4 layers of 256."""
    from transformers import BertModel

    return _encoder(_bert(4, 256, 4), BertModel)


def bert_dynamic() -> Built:
    """Build BERT-mini for any length of text."""
    from transformers import BertModel

    return _encoder(_bert(4, 256, 4), BertModel, dynamic=True)


def minilm() -> Built:
    """Build the BERT of all-MiniLM-L6-v2: 6 layers of 384."""
    from transformers import BertModel

    return _encoder(_bert(6, 384, 12, vocab_size=30522), BertModel)


class Cached(nn.Module):
    """A causal language model that keeps keys and values of earlier tokens in buffers."""

    def __init__(self, model: Any, heads: int, width: int, length: int) -> None:
        from transformers import StaticCache

        super().__init__()
        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        self.cache.early_initialization(1, heads, width, torch.float32, torch.device("cpu"))
        for index, layer in enumerate(self.cache.layers):
            for name in self._KEPT:
                self.register_buffer(f"{name}_{index}", getattr(layer, name).clone())

    _KEPT = ("keys", "values", "cumulative_length")

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the logits of tokens at consecutive positions."""
        for index, layer in enumerate(self.cache.layers):
            for name in self._KEPT:
                setattr(layer, name, self.get_buffer(f"{name}_{index}"))
            layer.cumulative_length.copy_(positions[0])
        arguments = {"position_ids": positions[None], "past_key_values": self.cache, "use_cache": True}
        return self.model(tokens, **arguments).logits


def _llama(layers: int, length: int) -> Built:
    """Build a Llama with a static cache of keys and values, for that many tokens at once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    # ExecuTorch cannot convert a program that writes values with gradients into a buffer.
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    return Built(Cached(model, heads=2, width=16, length=64), (_tokens(length), torch.arange(length)))


def _whisper() -> Any:
    from transformers import WhisperConfig

    return WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=128,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_source_positions=150,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
    )


def whisper_encoder() -> Built:
    """Build the encoder of a Whisper with 4 layers."""
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    model = WhisperEncoder(_whisper()).eval()
    return Built(Call(model, lambda m, x: m(input_features=x).last_hidden_state), (torch.randn(1, 80, 300),))


def whisper_decoder() -> Built:
    """Build the decoder of a Whisper with 4 layers."""
    from transformers.models.whisper.modeling_whisper import WhisperDecoder

    model = WhisperDecoder(_whisper()).eval()
    call = Call(model, lambda m, x, h: m(input_ids=x, encoder_hidden_states=h, use_cache=False).last_hidden_state)
    return Built(call, (_tokens(16), torch.randn(1, 150, 128)))


def quantize(model: nn.Module, inputs: tuple[Any, ...]) -> ExportedProgram:
    """Quantise to int8 with ExecuTorch's XNNPACK recipe."""
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    prepared = prepare_pt2e(export(model, inputs).module(), quantizer)
    prepared(*inputs)
    return export(convert_pt2e(prepared), inputs)


def resnet_int8() -> Built:
    """Build a ResNet with 8 basic blocks, quantised to int8 with PT2E."""
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 128], "depths": [2, 2, 2, 2]}
    built = _classifier("ResNet", layer_type="basic", **sizes)
    return Built(built.model, built.inputs, quantize=quantize)


class Recurrent(nn.Module):
    """A recurrent network with a classifier."""

    def __init__(self, kind: type[nn.Module], layers: int = 2) -> None:
        super().__init__()
        self.cells = kind(16, 32, num_layers=layers, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the classes of a sequence."""
        return self.head(self.cells(x)[0][:, -1])


def t5() -> Built:
    """Build a T5 with 2 layers on each side."""
    from transformers import T5Config, T5Model

    config = T5Config(vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    call = Call(T5Model(config).eval(), lambda m, x, y: m(input_ids=x, decoder_input_ids=y, use_cache=False)[0])
    return Built(call, (_tokens(16), _tokens(8)))


def clip() -> Built:
    """Build both towers of a CLIP with 2 layers each."""
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 1, **sizes}
    config = CLIPConfig(
        text_config=text, vision_config={"image_size": 64, "patch_size": 16, **sizes}, projection_dim=32
    )
    model = CLIPModel(config).eval()
    return Built(Call(model, lambda m, x, p: m(input_ids=x, pixel_values=p).logits_per_text), (_tokens(16), *_image()))


def wav2vec2() -> Built:
    """Build a Wav2Vec2 with 2 layers."""
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = Wav2Vec2Config(conv_dim=[32] * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, **sizes)
    model = Wav2Vec2Model(config).eval()
    return Built(Call(model, lambda m, x: m(input_values=x).last_hidden_state), (torch.randn(1, 4000),))


def distilbert() -> Built:
    """Build a DistilBERT with 3 layers."""
    from transformers import DistilBertConfig, DistilBertModel

    return _encoder(
        DistilBertConfig(vocab_size=VOCABULARY, dim=64, n_layers=3, n_heads=4, hidden_dim=128), DistilBertModel
    )


_SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
_GROUPED = {**_SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64}

ISSUE: dict[str, Callable[[], Built]] = {
    "mobilenet_v2": mobilenet_v2,
    "resnet50": resnet50,
    "vit_tiny": vit_tiny,
    "bert_mini": bert_mini,
    "minilm": minilm,
    "llama4_prefill": lambda: _llama(4, 16),
    "llama4_decode": lambda: _llama(4, 1),
    "llama16_prefill": lambda: _llama(16, 16),
    "llama16_decode": lambda: _llama(16, 1),
    "whisper_encoder": whisper_encoder,
    "whisper_decoder": whisper_decoder,
    "resnet_int8": resnet_int8,
    "bert_dynamic": bert_dynamic,
}
"""The models on which the speed is promised."""

OTHERS: dict[str, Callable[[], Built]] = {
    "lstm": lambda: Built(Recurrent(nn.LSTM).eval(), (torch.randn(1, 8, 16),)),
    "gru": lambda: Built(Recurrent(nn.GRU).eval(), (torch.randn(1, 8, 16),)),
    "t5": t5,
    "convnext": lambda: _classifier("ConvNext", hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 2, 1], image_size=64),
    "swin": lambda: _classifier(
        "Swin", image_size=64, embed_dim=16, depths=[1, 1, 2], num_heads=[1, 2, 4], window_size=4
    ),
    "efficientnet": lambda: _classifier(
        "EfficientNet", image_size=64, width_coefficient=0.5, depth_coefficient=0.5, hidden_dim=640
    ),
    "mobilenet_v1": lambda: _classifier("MobileNetV1", depth_multiplier=0.25, image_size=64),
    "regnet": lambda: _classifier(
        "RegNet", embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 2, 3, 1], groups_width=8
    ),
    "segformer": lambda: _classifier("Segformer", hidden_sizes=[16, 32, 48, 64], decoder_hidden_size=32),
    "distilbert": distilbert,
    "clip": clip,
    "wav2vec2": wav2vec2,
    "gpt2": lambda: _decoder("GPT2", n_embd=64, n_layer=3, n_head=4, n_positions=64),
    "qwen2": lambda: _decoder("Qwen2", **_GROUPED),
    "gemma": lambda: _decoder("Gemma", head_dim=16, **_GROUPED),
    "phi": lambda: _decoder("Phi", **_SMALL),
    "mamba": lambda: _decoder("Mamba", hidden_size=32, num_hidden_layers=2, state_size=8),
}
"""Architectures that the promise is tried on."""

MODELS = {**ISSUE, **OTHERS}

GROWTH: Sequence[tuple[str, str]] = (("llama4_prefill", "llama16_prefill"), ("llama4_decode", "llama16_decode"))
"""Pairs of models of which the second has four times the layers."""


def export_model(name: str, models: Mapping[str, Callable[[], Built]] = MODELS) -> tuple[ExportedProgram, Built]:
    """Export a model, with the same weights and inputs in every process.

    Args:
        name: One of the models.
        models: What builds them.

    Returns:
        The program, and what it was made of.
    """
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = models[name]()
        if built.quantize is not None:
            return built.quantize(built.model, built.inputs), built
        return export(built.model, built.inputs, dynamic_shapes=built.dynamic_shapes), built
