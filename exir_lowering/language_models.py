"""A causal language model of transformers becomes one method over a KV cache, as ExecuTorch's runners call it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from exir_lowering import graphs
from exir_lowering.errors import InputError, LoweringError, did_you_mean, exception_text, explained, few
from exir_lowering.lowered import LoweredMethods
from exir_lowering.options import LoweringOptions
from exir_lowering.pipeline import lower
from exir_lowering.plugins.backend import PartitionerLike
from exir_lowering.quantization.few_bits import quantize_embedding, quantize_layer

_BITS = {"8da4w": 4, "8da8w": 8}  # of the weights of linear layers
_ATTENTION = "exir_lowering"  # the name of ExecuTorch's attention in transformers
_LAYERS = {"full_attention", "sliding_attention"}
_BY_HAND = "Export it by hand, as docs/guides/language-models.md does, and `lower` that."
_MASKED = -1e9  # infinity is no number for a softmax over a part of the cache in which everything is masked


def language_model(
    model: torch.nn.Module,
    max_context: int = 2048,
    *,
    quantise: str | None = None,
    partitioners: PartitionerLike = "xnnpack",
    options: LoweringOptions | None = None,
) -> LoweredMethods:
    """Lower a causal language model of transformers to a method that generates text in ExecuTorch's `TextLLMRunner`.

    `forward(input_ids [1, n], cache_position [1])` takes a whole prompt or one token, and the position of the first
    one; it returns the logits `[1, vocabulary]` after the last one. The KV cache is state of the file, written in
    place, and attention is ExecuTorch's own, `llama::custom_sdpa`. The model is not changed.

    Args:
        model: A decoder of transformers with its weights, such as `AutoModelForCausalLM.from_pretrained(folder)`.
        max_context: How many tokens the cache holds, prompt and generated text together.
        quantise: None for float32. "8da4w": linear layers have weights of 4 bits in groups of 32, and activations of 8
            bits that are quantised in each call; the embedding has 8 bits, and so has an output layer that shares its
            weight, which is in the file once. "8da8w": 8 bits for all of them.
        partitioners: As for `lower`.
        options: As for `lower`.

    Returns:
        The lowered method; `.emit()` adds the methods with constants that `TextLLMRunner` reads, such as get_eos_ids.

    Raises:
        InputError: The model is no such decoder, or has an attention that ExecuTorch's does not compute; the context is
            longer than the positions it knows; or the quantisation is not known.
        LoweringError: As for `lower`.
    """
    check_model(model, max_context, quantise)
    memo: dict[int, Any] = {id(one): torch.nn.Parameter(one.detach(), False) for one in model.parameters()}
    memo |= {id(one): one for one in model.buffers()}
    program, constants = export_model(copy.deepcopy(model, memo), max_context, quantise)
    return replace(lower(program, partitioners, options=options), constant_methods=constants)


def check_model(model: Any, max_context: int, quantise: str | None) -> None:
    """Raise an InputError for a model that is no decoder with ordinary attention, or for an option that is invalid."""
    name, able = type(model).__name__, getattr(model, "can_generate", None)
    if able is None or not able() or model.main_input_name != "input_ids" or model.config.is_encoder_decoder:
        raise InputError(
            f"language_model: model: got a {name}, expected a causal language model of transformers, such as "
            "LlamaForCausalLM or another class of AutoModelForCausalLM. Lower other models with `lower`."
        )
    if quantise not in (None, *_BITS):
        hint = did_you_mean(str(quantise), _BITS, f" Expected {', '.join(_BITS)}, or none for float32.")
        raise InputError(f"language_model: quantise: none is called {quantise!r}.{hint}")
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or max_context
    if type(max_context) is not int or not 8 <= max_context <= positions:
        most = f"at most {positions}, the positions of {name}" if positions != max_context else "at least 8"
        raise InputError(f"language_model: max_context: got {max_context!r}, expected a number of tokens, {most}.")
    if others := set(getattr(config, "layer_types", None) or ()) - _LAYERS:
        raise InputError(
            f"language_model: model: {name} has layers of the kind {few(sorted(others), 3)}, expected full_attention "
            f"or sliding_attention, whose state is a KV cache. For others see docs/guides/recurrent-models.md."
        )


def export_model(model: Any, max_context: int, quantise: str | None) -> tuple[ExportedProgram, dict[str, Any]]:
    """Return the program of a model that was checked, and the constants of its file; the model is changed."""
    from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  (it registers torch.ops.llama)
    from transformers import AttentionInterface

    name, layers = type(model).__name__, model.config.get_text_config().num_hidden_layers
    model = model.float().eval().requires_grad_(False)
    if quantise:
        _quantise(model, _BITS[quantise])
    AttentionInterface.register(_ATTENTION, _attend)
    tokens, position = torch.zeros(1, 7, dtype=torch.long), torch.tensor([0])
    sizes = {"input_ids": {1: Dim("length", max=max_context - 1)}, "cache_position": None}
    what = f"language_model: model: {name} cannot be exported with ExecuTorch's attention and cache"
    explaining = explained(lambda error: InputError(f"{what}: {exception_text(error)}. {_BY_HAND}"), LoweringError)
    with explaining, torch.no_grad():
        model.set_attn_implementation(_ATTENTION)
        program = torch.export.export(_Decoder(model, max_context), (tokens, position), dynamic_shapes=sizes)
    names = [graphs.operator_name(node) for node in program.graph.nodes if graphs.is_operator(node)]
    if (found := names.count("llama.custom_sdpa.default")) != layers:
        raise InputError(
            f"language_model: model: {name} takes ExecuTorch's attention in {found} of {layers} layers, expected all: "
            f"its class has an attention of its own. {_BY_HAND}"
        )
    return program, _describe(model, max_context)


def _quantise(model: Any, bits: int) -> None:
    """Quantise linear layers and the embedding in place; what both share, they share then, too."""
    from torchao.utils import unwrap_tensor_subclass

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    rows = head if head.weight is embedding.weight else torch.nn.Linear(1, 1, device="meta")
    rows.weight = embedding.weight
    for one in model.parameters():
        if one.ndim == 1:  # it stays in float, and would keep the mapping of a file with all weights
            one.data = one.data.clone()
    quantize_layer(rows, 8)
    quantize_embedding(embedding, rows)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and layer is not rows:
            quantize_layer(layer, bits, torch.bfloat16)  # which XNNPACK rounds scales of groups to
    unwrap_tensor_subclass(model)  # plain tensors are exported faster


def _describe(model: Any, max_context: int) -> dict[str, Any]:
    """Return what ExecuTorch's runner asks a file for."""
    config, chosen = model.config.get_text_config(), model.generation_config
    end = [chosen.eos_token_id] if isinstance(chosen.eos_token_id, int) else chosen.eos_token_id
    found = {"get_vocab_size": config.vocab_size, "get_bos_id": chosen.bos_token_id, "get_eos_ids": end}
    found |= {"get_max_seq_len": max_context, "get_max_context_len": max_context}
    found |= {"get_n_layers": config.num_hidden_layers}
    found |= dict.fromkeys(("use_kv_cache", "use_sdpa_with_kv_cache", "enable_dynamic_shape"), True)
    return {name: value for name, value in found.items() if value is not None}


class _Decoder(torch.nn.Module):
    """Tokens `[1, n]` and the position of the first one `[1]` to logits `[1, vocabulary]`; it has the cache."""

    def __init__(self, model: Any, length: int) -> None:
        super().__init__()
        self.model, self._length, config = model, length, model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._window = getattr(config, "sliding_window", None)
        for layer in range(config.num_hidden_layers):
            for kind in ("keys", "values"):
                self.register_buffer(f"{kind}_{layer}", torch.zeros(1, length, heads, size))

    def forward(self, input_ids: torch.Tensor, cache_position: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token."""
        positions, start = cache_position + torch.arange(input_ids.shape[1]), cache_position[0].item()
        window = None
        if self._window is not None and self._window < self._length:
            oldest = (positions[:1] - self._window + 1).clamp(min=0)  # that a new token sees; earlier ones are left out
            first, count = oldest.item(), (positions[-1:] + 1 - oldest).item()
            for known in (first >= 0, count >= 0, count <= self._length, first + count <= self._length):
                torch._check(known)  # type: ignore[no-untyped-call]
            behind = positions[:, None] - oldest - torch.arange(count)
            window = first, count, ((behind < 0) | (behind >= self._window)).float() * _MASKED
        given = {"decoder": self, "start": start, "window": window, "use_cache": False, "logits_to_keep": 1}
        logits: torch.Tensor = self.model(input_ids, position_ids=positions[None], **given).logits
        return logits[:, 0]


def _attend(
    module: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: None, **given: Any
) -> tuple[torch.Tensor, None]:
    """Write keys and values of new tokens into the cache; attend to all positions up to each query's, or a window."""
    if given.get("softcap") is not None or given.get("s_aux") is not None or not getattr(module, "is_causal", True):
        raise InputError(
            f"language_model: model: {type(module).__name__} has a soft cap, sinks or no causal order, expected plain "
            f"causal attention, as ExecuTorch's custom_sdpa computes it. {_BY_HAND}"
        )
    decoder, start, scaling, window = (given[key] for key in ("decoder", "start", "scaling", "window"))
    cached = [getattr(decoder, f"{kind}_{module.layer_idx}") for kind in ("keys", "values")]
    for new, whole in zip((keys, values), cached, strict=True):
        torch.ops.llama.update_cache(new.transpose(1, 2), whole, start)
    masked: tuple[Any, ...] = (start, None, 0.0, True)
    if window is not None and given.get("sliding_window") is not None:
        first, count, mask = window
        cached, masked = [whole.narrow(1, first, count) for whole in cached], (0, mask, 0.0, False)
    return torch.ops.llama.custom_sdpa(query.transpose(1, 2), *cached, *masked, scaling), None
