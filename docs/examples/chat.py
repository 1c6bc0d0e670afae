"""Trains a very small chat model, quantises it, and writes chat.pte and tokenizer.json for the three clients."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.export import Dim, export
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
from torchao.quantization.granularity import PerGroup
from torchao.utils import unwrap_tensor_subclass
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

import exir_lowering

LENGTH = 64  # of a whole chat, in tokens
CHATS = [f"\n> i am {name}\n< hi {name}\n> who am i?\n< {name}\n" for name in ("ann", "bob")]
END_OF_TURN = ord("\n")


def trained():
    """Return a model that knows two chats, in place of `LlamaForCausalLM.from_pretrained(...)`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, tie_word_embeddings=True, **sizes, **heads))
    chats = torch.tensor([list(chat.encode()) for chat in CHATS])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(200):
        optimizer.zero_grad()
        model(input_ids=chats, labels=chats).loss.backward()
        optimizer.step()
    return model.eval()


def save_tokenizer(path):
    """Write a tokenizer whose tokens are the bytes of ASCII, in the alphabet of byte-level BPE."""
    vocabulary = {chr(byte if byte > 32 else byte + 256): byte for byte in range(127)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(path)


def quantised(model):
    """Return the model in 8da4w, except for its output layer, which shares its weight with the embedding."""
    config = Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32))
    quantize_(model, config, lambda module, name: isinstance(module, torch.nn.Linear) and name != "lm_head")
    return unwrap_tensor_subclass(model)


def exported(model):
    """Return two programs over one KV cache: `forward` takes a prompt of any length, `step` one token."""
    model.generation_config.update(cache_implementation="static")
    cached = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=LENGTH).model
    tokens, start = torch.zeros(1, 8, dtype=torch.long), torch.tensor([0])
    any_length = {"input_ids": {1: Dim("length", max=LENGTH - 1)}, "cache_position": None}
    prompt, token = ({"input_ids": each, "cache_position": start} for each in (tokens, tokens[:, :1]))
    return {
        "forward": export(cached, (), prompt, dynamic_shapes=any_length, strict=True),
        "step": export(cached, (), token, strict=True),
    }


model = trained()
save_tokenizer("tokenizer.json")
metadata = {
    "get_vocab_size": model.config.vocab_size,
    "get_eos_ids": [END_OF_TURN],
    "get_max_seq_len": LENGTH,
    "get_max_context_len": LENGTH,
    "use_kv_cache": True,
    "use_sdpa_with_kv_cache": False,
    "enable_dynamic_shape": True,
}
lowered = exir_lowering.lower(exported(quantised(model)), "xnnpack")
lowered.emit(constant_methods=metadata).save("chat.pte")
print(lowered)
