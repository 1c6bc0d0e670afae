"""Small language models of transformers with random weights, a tokenizer of letters, and who generates with a file."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerAxis, PerGroup

LETTERS = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
TEXT = "she sells sea shells"  # longer than a window of Gemma3

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen3": {"tie_word_embeddings": True},
    "Llama": {},
    "Gemma3": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
    },
    "SmolLM3": {"no_rope_layers": [1, 0], "tie_word_embeddings": True, "pad_token_id": 0},
    "Phi3": {"pad_token_id": 0},
}


SEEDS = {"Qwen3": 25, "Llama": 1, "SmolLM3": 68}
"""Of weights whose greedy tokens are decided: sums in another order, which move activations of 8 bits, and logits by up
to 0.2, give the same ones, in PyTorch too. Of the seeds up to 90, these leave the most between the first two tokens."""


def make_model(architecture: str, seed: int | None = None, **more: Any) -> Any:
    """Return a small model, the same one each time."""
    torch.manual_seed(SEEDS.get(architecture, 0) if seed is None else seed)
    sizes = {"vocab_size": len(LETTERS), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
    others = {"initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": len(LETTERS), "tie_word_embeddings": False}
    name = {"Gemma3": "Gemma3TextConfig"}.get(architecture, f"{architecture}Config")
    config = getattr(transformers, name)(**{**sizes, **heads, **others, **ARCHITECTURES[architecture], **more})
    return getattr(transformers, f"{architecture}ForCausalLM")(config).eval().requires_grad_(False)


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are letters."""
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tokenizer


def quantised(model: Any, precision: str | None) -> Any:
    """Return a copy of a model with the weights that torchao's `quantize_` makes, in PyTorch."""
    model = copy.deepcopy(model)
    if precision is None:
        return model
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    rows = Int8DynamicActivationIntxWeightConfig(torch.int8, PerAxis(0))
    groups = Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32), weight_scale_dtype=torch.bfloat16)
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    within = [name for name in linear if not (tied and name == "lm_head")]
    quantize_(model, groups if precision == "8da4w" else rows, lambda module, name: name in within)
    quantize_(model, rows, lambda module, name: name in linear and name not in within)
    embedding = lambda module, name: isinstance(module, torch.nn.Embedding)  # noqa: E731
    quantize_(model, IntxWeightOnlyConfig(torch.int8, PerAxis(0)), embedding)
    return model


def rounded_otherwise(model: Any, seed: int) -> Any:
    """Return the model with weights of norms that are moved by less than sums in another order move their results."""
    torch.manual_seed(seed)
    for layer in model.modules():
        if type(layer).__name__.endswith("RMSNorm"):
            layer.weight = torch.nn.Parameter(layer.weight * (1 + 5e-7 * torch.randn_like(layer.weight)), False)
    return model


def generate(next_logits: Callable[[torch.Tensor, int], torch.Tensor], count: int) -> list[int]:
    """Return the greedy tokens after the text: of logits after new tokens `[1, n]` that begin at a position."""
    tokens = make_tokenizer().encode(TEXT).ids
    new, made = torch.tensor([tokens]), []
    for _ in range(count):
        made.append(int(next_logits(new, len(tokens) + len(made) - new.shape[1]).flatten().argmax()))
        new = torch.tensor([made[-1:]])
    return made


def generate_eager(model: Any, count: int) -> list[int]:
    """Return what a model generates in PyTorch with its own attention and without a cache."""
    seen: list[torch.Tensor] = []

    def run(new: torch.Tensor, position: int) -> torch.Tensor:
        seen.append(new)
        return model(torch.cat(seen, 1), use_cache=False).logits[0, -1]

    with torch.no_grad():
        return generate(run, count)


def generate_runner(path: Path, count: int) -> str:
    """Return what a file generates in ExecuTorch's `TextLLMRunner`, with the tokenizer beside it."""
    from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

    pieces: list[str] = []
    runner = TextLLMRunner(str(path), str(path.with_name("tokenizer.json")))
    options = GenerationConfig(echo=False, max_new_tokens=count, temperature=0.0, num_bos=0)
    runner.generate(TEXT, options, pieces.append)
    return "".join(pieces)
