"""A Llama of transformers with ExecuTorch's attention, which reads the KV cache in place up to the current position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  (it registers the operators)
from torch import nn
from torch.export import Dim, ExportedProgram, export
from transformers import AttentionInterface, LlamaForCausalLM


def attend(
    module: nn.Module, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: None, **others: Any
) -> tuple[torch.Tensor, None]:
    """Attend to all positions up to each query's own; keys and values are a whole cache."""
    start, scale = others["start"], others["scaling"]
    return torch.ops.llama.custom_sdpa(query.transpose(1, 2), keys, values, start, None, 0.0, True, scale), None


AttentionInterface.register("executorch", attend)


class Decoder(nn.Module):
    """Tokens `[1, n]` and the position of the first one `[1]` to the logits of the last one `[1, vocabulary]`.

    It is the model's cache, too: keys and values by layer, each `[1, length, heads, size]`.
    """

    def __init__(self, model: LlamaForCausalLM, length: int) -> None:
        super().__init__()
        model.set_attn_implementation("executorch")
        self.model, config = model, model.config
        self.start: Any = 0
        for layer in range(config.num_hidden_layers):
            for kind in ("keys", "values"):
                empty = torch.zeros(1, length, config.num_key_value_heads, config.head_dim)
                self.register_buffer(f"{kind}_{layer}", empty)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, **others: Any) -> tuple[torch.Tensor, ...]:
        """Write keys and values `[1, heads, tokens, size]` of new tokens in place; return the whole cache."""
        cached = getattr(self, f"keys_{layer}"), getattr(self, f"values_{layer}")
        for new, whole in zip((keys, values), cached, strict=True):
            torch.ops.llama.update_cache(new.transpose(1, 2), whole, self.start)
        return cached

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token."""
        self.start = position[0].item()
        positions = (torch.arange(tokens.shape[1]) + position)[None]
        options = {"use_cache": True, "logits_to_keep": 1, "start": self.start}
        return self.model(tokens, position_ids=positions, cache=self, **options).logits[:, 0]


def export_methods(module: nn.Module, length: int, *, strict: bool = False) -> Mapping[str, ExportedProgram]:
    """Return `forward`, which takes any number of tokens below `length`, and `step`, which takes one."""
    tokens, position = torch.zeros(1, 8, dtype=torch.long), torch.tensor([0])
    any_length = {"tokens": {1: Dim("tokens", max=length - 1)}, "position": None}
    with torch.no_grad():
        forward = export(module, (tokens, position), dynamic_shapes=any_length, strict=strict)
        return {"forward": forward, "step": export(module, (tokens[:, :1], position), strict=strict)}
