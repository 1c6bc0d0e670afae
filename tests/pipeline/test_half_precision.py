"""Models of transformers in half precision: as exact as eager mode, where kernels accumulate in half or overflow."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import transformers
from torch.export import export

import exir_lowering

WIDTH = 320  # the runtime's own layer norm is garbage from 256 elements on


class Called(torch.nn.Module):
    """A model of transformers whose arguments are given by position, and that returns its first result."""

    def __init__(self, model: torch.nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(**dict(zip(self.names, given, strict=True)))[0]
        return result


SHARED = {"num_hidden_layers": 1, "num_attention_heads": 5, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
Given = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]


def bert() -> Given:
    model = transformers.BertModel(transformers.BertConfig(vocab_size=64, **SHARED))
    return Called(model, "input_ids"), (torch.arange(24)[None],)


def vit() -> Given:
    model = transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **SHARED))
    return Called(model, "pixel_values"), (torch.randn(1, 3, 32, 32),)


def llama() -> Given:
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=5, use_cache=False, **SHARED)
    return Called(transformers.LlamaModel(config), "input_ids"), (torch.arange(24)[None],)


def convnext() -> Given:
    config = transformers.ConvNextConfig(hidden_sizes=[40, 80, 160, WIDTH], depths=[1] * 4, image_size=32)
    return Called(transformers.ConvNextModel(config), "pixel_values"), (torch.randn(1, 3, 32, 32),)


def whisper() -> Given:
    sizes = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers",)}
    config = transformers.WhisperConfig(
        d_model=WIDTH, vocab_size=64, num_mel_bins=8, max_source_positions=32, max_target_positions=16, use_cache=False,
        encoder_attention_heads=5, decoder_attention_heads=5, encoder_ffn_dim=WIDTH, decoder_ffn_dim=WIDTH,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, **sizes,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    return Called(model, "input_features", "decoder_input_ids"), (torch.randn(1, 8, 64), torch.arange(8)[None])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("make", [bert, vit, llama, convnext, whisper])
def test_a_model_is_as_exact_as_in_eager_mode(make: Callable[[], Given], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, given = make()
    model = model.eval().to(dtype)
    given = tuple(each.to(dtype) if each.is_floating_point() else each for each in given)
    with torch.no_grad():
        eager = model(*given).double()
        program = export(model, given)
        exact = copy.deepcopy(model).double()(*(each.double() if each.is_floating_point() else each for each in given))
    allowed = 4 * (eager - exact).abs().max()
    (result,) = exir_lowering.load(exir_lowering.lower(program, "xnnpack").emit().buffer).run("forward", *given)
    assert result.dtype is dtype and bool(((result.double() - exact).abs() <= allowed).all())
