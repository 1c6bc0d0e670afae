"""The fast conversion makes what ExecuTorch's makes of small models of many architectures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import both_ways
import pytest
import torch
import transformers
from torch import nn
from torch.export import ExportedProgram, export
from transformers.models.speecht5.modeling_speecht5 import SpeechT5EncoderWithTextPrenet

TEXT = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
}
IMAGES = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
WORDS = torch.arange(3, 9)[None]


class Named(nn.Module):
    """Calls a model with one input, and returns the first of its results."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(**{self.name: x}, return_dict=True).to_tuple()[0]
        return result


def _of(model: type[nn.Module], config: Any, name: str = "input_ids") -> ExportedProgram:
    torch.manual_seed(0)
    inputs = IMAGES if name == "pixel_values" else WORDS
    return export(Named(model(config).eval(), name), (inputs,), strict=False)


def falcon() -> ExportedProgram:
    sizes = {key: value for key, value in TEXT.items() if key not in ("intermediate_size", "max_position_embeddings")}
    return _of(transformers.FalconForCausalLM, transformers.FalconConfig(**sizes))


def speecht5_text_encoder() -> ExportedProgram:
    ends = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
    config = transformers.SpeechT5Config(hidden_size=16, vocab_size=50, max_text_positions=32, **ends)
    return _of(SpeechT5EncoderWithTextPrenet, config, "input_values")


def deberta() -> ExportedProgram:
    config = transformers.DebertaConfig(**TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"])
    return _of(transformers.DebertaModel, config)


def gemma3() -> ExportedProgram:
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    config = transformers.Gemma3TextConfig(**TEXT, **layers, num_key_value_heads=1, head_dim=8)
    return _of(transformers.Gemma3ForCausalLM, config)


def mamba() -> ExportedProgram:
    sizes = {"vocab_size": 50, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "use_cache": False}
    return _of(transformers.MambaForCausalLM, transformers.MambaConfig(**sizes))


def swin() -> ExportedProgram:
    stages = {"embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
    return _of(transformers.SwinModel, transformers.SwinConfig(image_size=32, patch_size=4, **stages), "pixel_values")


def mobilevit() -> ExportedProgram:
    widths = {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32]}
    config = transformers.MobileViTConfig(image_size=32, num_attention_heads=2, **widths)
    return _of(transformers.MobileViTModel, config, "pixel_values")


QUICK: Mapping[str, Callable[[], ExportedProgram]] = {
    "falcon": falcon,
    "speecht5_text_encoder": speecht5_text_encoder,
}
SLOW: Mapping[str, Callable[[], ExportedProgram]] = {
    "deberta": deberta,
    "gemma3": gemma3,
    "mamba": mamba,
    "swin": swin,
    "mobilevit": mobilevit,
}


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.nightly) for name in SLOW)])
def test_both_ways_are_equal(name: str) -> None:
    program = {**QUICK, **SLOW}[name]()
    assert both_ways.compare(program).differences == []
