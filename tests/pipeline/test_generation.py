"""A language model with a KV cache in one file: prefill and decode share the weights and the cache."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.export import Dim, ExportedProgram, export
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

import exir_lowering
from exir_lowering import LoadedProgram
from exir_lowering.backends.reference import reference_partitioner

LENGTH, STEPS = 64, 32
PARTITIONERS = {"reference": reference_partitioner(own_state=False), "xnnpack": "xnnpack"}


class Cached(torch.nn.Module):
    """The model over its cache; the cache is this module's buffers."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.inner = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=LENGTH)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(input_ids=tokens, cache_position=positions)
        return logits


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A Llama of random weights: rotary positions, fewer heads for keys than for queries."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.generation_config.cache_implementation = "static"
    return model


@pytest.fixture(scope="module")
def programs(model: LlamaForCausalLM) -> dict[str, ExportedProgram]:
    """A prompt of any length, and one token."""
    cached = Cached(model)
    tokens, positions = prompt(5)
    length = Dim("length", min=2, max=LENGTH - 1)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        # Only a strict export sees that the tensors of transformers' cache are the module's buffers.
        return {
            "prefill": export(cached, (tokens, positions), dynamic_shapes=({1: length}, {0: length}), strict=True),
            "decode": export(cached, (tokens[:, :1], positions[:1]), strict=True),
        }


def prompt(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(3, 3 + 7 * length, 7).reshape(1, -1) % 512, torch.arange(length)


def emitted(programs: dict[str, ExportedProgram], partitioner: Any) -> bytes:
    """Lower methods to one file, in which they share the cache, which is one memory, beside a constant method."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exir_lowering.lower(programs, partitioner).emit(constant_methods={"get_max_seq_len": LENGTH}).buffer


@pytest.fixture(scope="module", params=PARTITIONERS)
def file(request: pytest.FixtureRequest, programs: dict[str, ExportedProgram]) -> tuple[str, bytes]:
    return request.param, emitted(programs, PARTITIONERS[request.param])


def generate(program: LoadedProgram, length: int) -> list[int]:
    (logits,) = program.run("prefill", *prompt(length))
    tokens = [int(logits[0, -1].argmax())]
    for position in range(length, length + STEPS):
        (logits,) = program.run("decode", torch.tensor([[tokens[-1]]]), torch.tensor([position]))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def expected(model: LlamaForCausalLM, length: int) -> list[int]:
    tokens, _ = prompt(length)
    made = model.generate(
        tokens, max_new_tokens=STEPS + 1, do_sample=False, cache_implementation=None, eos_token_id=None, pad_token_id=0
    )
    found: list[int] = made[0, length:].tolist()
    return found


def test_greedy_tokens(file: tuple[str, bytes], model: LlamaForCausalLM) -> None:
    """What transformers generates, for prompts of several lengths one after the other: the cache is started over."""
    program = exir_lowering.load(file[1])
    for length in (7, 3, 30):
        want = expected(model, length)
        assert len(set(want)) > 3, "a model that repeats one token shows nothing"
        assert generate(program, length) == want


def test_a_method_is_rewritten_beside_another_one_as_it_is_alone(programs: dict[str, ExportedProgram]) -> None:
    """Both bound what they write into the cache."""
    together = exir_lowering.plan(programs, "xnnpack")
    for name, method in zip(programs, together.methods, strict=True):
        (alone,) = exir_lowering.plan({name: programs[name]}, "xnnpack").methods
        assert (len(method.host), len(method.rewritings)) == (len(alone.host), len(alone.rewritings))
        assert not method.refused_rewrites
    assert len(together.states) == 6 and all(state.shared for state in together.states)
