"""ExecuTorch's attention in a language model: methods that share a cache write it and read it in place."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
import torch
from decoders import Decoder, export_methods
from tokenizers import Tokenizer, decoders as token_decoders, models, pre_tokenizers
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
from torchao.quantization.granularity import PerGroup
from torchao.utils import unwrap_tensor_subclass
from transformers import LlamaConfig, LlamaForCausalLM

import exir_lowering

LENGTH, STEPS, TEXT = 1024, 12, "she sells"
LETTERS = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
HEADS, SIZE = 2, 16


class Made:
    """A file, the prompt, and the tokens that PyTorch generates without a cache and with its own attention."""

    def __init__(self, weights: str, folder: Path) -> None:
        self.folder, self.path = folder, folder / "llm.pte"
        letters = {letter: number for number, letter in enumerate(LETTERS)}
        self.tokenizer = Tokenizer(models.BPE(letters, []))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = token_decoders.ByteLevel()
        self.tokenizer.save(str(folder / "tokenizer.json"))
        self.prompt = torch.tensor([self.tokenizer.encode(TEXT).ids])
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(LETTERS),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=HEADS,
            max_position_embeddings=LENGTH,
            initializer_range=0.2,
        )
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        if weights == "8da4w":
            quantize_(model, Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)))
            unwrap_tensor_subclass(model)
        tokens = self.prompt
        while tokens.shape[1] < self.prompt.shape[1] + STEPS:
            tokens = torch.cat([tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        self.expected = tokens[0, self.prompt.shape[1] :].tolist()
        lowered = exir_lowering.lower(export_methods(Decoder(model, LENGTH), LENGTH), "xnnpack")
        lengths = {"get_max_seq_len": LENGTH, "get_max_context_len": LENGTH, "get_vocab_size": len(LETTERS)}
        options = {"use_kv_cache": True, "use_sdpa_with_kv_cache": True, "enable_dynamic_shape": True}
        metadata = {**lengths, **options, "get_eos_ids": [len(LETTERS)]}
        lowered.emit(constant_methods=metadata).save(self.path)


@pytest.fixture(scope="module", params=["float", "8da4w"])
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(request.param, tmp_path_factory.mktemp(request.param))


def test_greedy_tokens_of_two_methods(weights: Made) -> None:
    """Twice, so that the second prompt meets a cache that is full of other tokens."""
    assert len(set(weights.expected)) > 3, "a model that repeats one token shows nothing"
    program = exir_lowering.load(weights.path)
    for _ in range(2):
        tokens = weights.prompt
        for step in range(STEPS):
            inputs = (tokens[:, -1:], torch.tensor([tokens.shape[1] - 1])) if step else (tokens, torch.tensor([0]))
            (logits,) = program.run("step" if step else "forward", *inputs)
            tokens = torch.cat([tokens, logits.argmax(-1)[None]], 1)
        assert tokens[0, weights.prompt.shape[1] :].tolist() == weights.expected


def test_greedy_tokens_of_executorchs_runner(weights: Made) -> None:
    from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

    pieces: list[str] = []
    runner = TextLLMRunner(str(weights.path), str(weights.folder / "tokenizer.json"))
    runner.generate(TEXT, GenerationConfig(echo=False, max_new_tokens=STEPS, temperature=0.0), pieces.append)
    assert "".join(pieces) == weights.tokenizer.decode(weights.expected)


def test_the_cache_is_not_copied(weights: Made) -> None:
    """The state is all that is as large as a cache, in a method of one token."""
    (step,) = [one for one in exir_lowering.inspect(weights.path).methods if one.name == "step"]
    cache = LENGTH * HEADS * SIZE * 4
    activations, state = sorted(arena.bytes for arena in step.memory.arenas)
    assert activations < cache and 4 * cache <= state < 5 * cache


class Rows(torch.nn.Module):
    """Writes rows of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(1, 4, 1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.ops.llama.update_cache(x, self.state, 1)
        return self.state * 2


RUN = """
import sys, torch, exir_lowering

program = exir_lowering.load(sys.argv[1], limits=exir_lowering.Limits(seconds=60) if sys.argv[2] else None)
(got,) = program.run("forward", torch.ones(1, 2, 1, 2))
assert "executorch.extension.llm.custom_ops.custom_ops" not in sys.modules
print(*got.flatten().int().tolist())
from executorch.extension.llm.custom_ops import custom_ops
assert program.run("forward", torch.ones(1, 2, 1, 2))[0].equal(got)
"""


@pytest.mark.parametrize("limited", ["", "limited"])
def test_its_kernels_are_found_without_an_import(tmp_path: Path, limited: str) -> None:
    """They are in a library of ExecuTorch's wheel, which may be imported later as well."""
    path = tmp_path / "rows.pte"
    exir_lowering.lower(torch.export.export(Rows(), (torch.ones(1, 2, 1, 2),))).emit().save(path)
    done = forked.run(RUN, path, limited)
    assert (done.returncode, done.stdout.split()) == (0, [*"00222200"]), done.stderr
