"""Language models as people bring them: transformers' modules with a cache, quantised weights, half floats."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from lowering_support import SUMS_IN_HALF
from torch.export import Dim, ExportedProgram, export
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.utils import unwrap_tensor_subclass
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.integrations.executorch import (
    TorchExportableModuleForDecoderOnlyLM,
    TorchExportableModuleWithHybridCache,
    TorchExportableModuleWithStaticCache,
    convert_and_export_with_cache,
)

import exir_lowering
from exir_lowering import LoweredMethods

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
}
FUSING = ExecutorchBackendConfig(do_quant_fusion_and_const_prop=True)


def llama(**changes: Any) -> PreTrainedModel:
    return prepared(LlamaForCausalLM, LlamaConfig(**{**SIZES, **changes}))


def qwen(**changes: Any) -> PreTrainedModel:
    """Normalised heads, and an output layer of its own."""
    return prepared(Qwen3ForCausalLM, Qwen3Config(**{**SIZES, **changes}, tie_word_embeddings=False))


def gemma() -> PreTrainedModel:
    """A layer that sees a window of 8 tokens, and one that sees all."""
    kinds = ["sliding_attention", "full_attention"]
    return prepared(Gemma3ForCausalLM, Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=kinds))


def prepared(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = kind(config).eval()
    cache = {"batch_size": 1, "max_cache_len": 24}
    model.generation_config.update(use_cache=True, cache_implementation="static", cache_config=cache)
    return model


PROMPT = torch.tensor([[5, 17, 80, 33, 2]])
START = torch.tensor([0])
GIVEN = {"input_ids": PROMPT, "cache_position": START}
ANY_LENGTH = {"input_ids": {1: Dim("length", max=23)}, "cache_position": None}


def static(model: PreTrainedModel) -> ExportedProgram:
    return export(TorchExportableModuleWithStaticCache(model), (), GIVEN, dynamic_shapes=ANY_LENGTH, strict=True)


def decoder_only(model: PreTrainedModel) -> ExportedProgram:
    """As optimum-executorch exports: a position for each token."""
    module = TorchExportableModuleForDecoderOnlyLM(model)
    length = Dim("length", max=23)
    shapes = {"input_ids": {1: length}, "cache_position": {0: length}}
    return module.export(PROMPT, cache_position=torch.arange(5), dynamic_shapes=shapes)


def hybrid(model: PreTrainedModel) -> ExportedProgram:
    module = TorchExportableModuleWithHybridCache(model, batch_size=1, max_cache_len=24)
    return export(module, (), GIVEN, dynamic_shapes=ANY_LENGTH, strict=True)


def converted(model: PreTrainedModel) -> ExportedProgram:
    """One token at a time."""
    return convert_and_export_with_cache(model, PROMPT[:, :1], START, strict=True)


MODULES: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[PreTrainedModel], ExportedProgram]]] = {
    "static": (lambda: llama(num_hidden_layers=1), static),
    "optimum": (lambda: qwen(num_hidden_layers=1), decoder_only),
    "hybrid": (gemma, hybrid),
    "converted": (lambda: llama(num_hidden_layers=1), converted),
}


def generated(run: Callable[..., torch.Tensor], program: ExportedProgram) -> list[torch.Tensor]:
    """Return the logits of a prompt, of tokens behind it, and of another text from the start."""
    tokens, start = (node.meta["val"] for node in program.graph.nodes if node.name in ("input_ids", "cache_position"))
    results = []
    for text in (PROMPT, PROMPT.flip(1)):
        pieces = [text, *torch.tensor([[7], [8], [9], [1], [50], [60]]).unsqueeze(1)]
        if isinstance(tokens.shape[1], int):
            pieces = list(torch.cat(pieces, 1).split(1, 1))
        at = 0
        for piece in pieces:
            count = piece.shape[1] if not isinstance(start.shape[0], int) else 1
            results.append(run(piece, torch.arange(at, at + count)))
            at += piece.shape[1]
    return results


def in_eager(program: ExportedProgram) -> Callable[..., torch.Tensor]:
    module = program.module()

    @torch.no_grad()
    def run(tokens: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = module(input_ids=tokens, cache_position=start)
        return result

    return run


def in_the_runtime(
    lowered: LoweredMethods, config: ExecutorchBackendConfig | None = None
) -> Callable[..., torch.Tensor]:
    loaded = exir_lowering.load(lowered.emit(config).buffer)
    return lambda tokens, start: loaded.run("forward", tokens, start)[0]


@pytest.mark.parametrize("name", MODULES)
def test_exportable_modules_of_transformers_work_as_they_are(name: str) -> None:
    make, exporter = MODULES[name]
    program = exporter(make())
    lowered = exir_lowering.lower(program, "xnnpack")
    got, expected = generated(in_the_runtime(lowered), program), generated(in_eager(program), program)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert len(got) >= 14


def test_a_cache_that_is_out_of_sight_is_state() -> None:
    """Without `strict`, torch.export finds tensors behind an object that is no module: constants that are written."""
    module = TorchExportableModuleWithStaticCache(llama(num_hidden_layers=1))
    eager = copy.deepcopy(module)
    loaded = exir_lowering.load(exir_lowering.lower(export(module, (), GIVEN, strict=False), "xnnpack").emit().buffer)
    for number in range(4):
        tokens = (PROMPT + number) % SIZES["vocab_size"]
        with torch.no_grad():
            expected = eager(input_ids=tokens, cache_position=START)
        torch.testing.assert_close(loaded.run("forward", tokens, START)[0], expected, atol=1e-4, rtol=1e-4)


# -- weights in few bits, and half floats -------------------------------------------------------------


class Words(torch.nn.Module):
    """What of a language model quantisation is about: embedding, linear layers, a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(96, 64)
        self.first, self.out = torch.nn.Linear(64, 128), torch.nn.Linear(128, 96, bias=False)
        self.norm = torch.nn.LayerNorm(128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.norm(torch.nn.functional.silu(self.first(self.embedding(tokens)))))
        return result


TOKENS = torch.tensor([[5, 17, 80, 33, 2, 95, 0]])


def words(*changes: Any) -> ExportedProgram:
    """Return a program of quantised weights, a configuration for each kind of layer, or of another dtype."""
    model = Words().eval()
    for change in changes:
        if isinstance(change, torch.dtype):
            model.to(change)
        else:
            kind, config = change
            quantize_(model, config, lambda module, _, kind=kind: isinstance(module, kind))
    unwrap_tensor_subclass(model)
    return export(model, (TOKENS,))


def linear(dtype: torch.dtype, granularity: Any) -> Any:
    return torch.nn.Linear, Int8DynamicActivationIntxWeightConfig(dtype, granularity)


def embedding(dtype: torch.dtype, granularity: Any) -> Any:
    return torch.nn.Embedding, IntxWeightOnlyConfig(dtype, granularity)


ROUNDING = 1e-5
SCALES_IN_BF16 = 0.02
"""XNNPACK keeps the scales of groups of weights with 8 bits; logits are up to 1.7."""
FEW_BITS = {
    "8da8w": ([linear(torch.int8, PerAxis(0))], ROUNDING),
    "8da4w": ([linear(torch.int4, PerGroup(32))], SCALES_IN_BF16),
    "embedding of 8 bits": ([embedding(torch.int8, PerAxis(0))], ROUNDING),
    "embedding of 8 bits in groups": ([embedding(torch.int8, PerGroup(32))], ROUNDING),
    "embedding of 4 bits": ([embedding(torch.int4, PerGroup(32))], ROUNDING),
    "embedding of 2 bits": ([embedding(torch.int2, PerGroup(32))], ROUNDING),
    "both": ([linear(torch.int4, PerGroup(32)), embedding(torch.int4, PerGroup(32))], SCALES_IN_BF16),
    "float16": ([torch.float16], 0.01 if SUMS_IN_HALF else 2e-3),
    "bfloat16": ([torch.bfloat16], 0.03),  # 4 steps of a number of 8 bits below 2
}


@pytest.mark.parametrize("name", FEW_BITS)
def test_weights_of_few_bits(name: str) -> None:
    changes, tolerance = FEW_BITS[name]
    program = words(*changes)
    lowered = exir_lowering.lower(program, "xnnpack")
    host = {node.operator for node in lowered.report.methods[0].host}
    if "bfloat16" not in name:  # which XNNPACK does not compute with
        assert not [operator for operator in host if "mm" in operator or "linear" in operator]
    with torch.no_grad():
        expected = program.module()(TOKENS)
    for config in (None, FUSING) if "embedding" in name or name == "both" else (FUSING,):
        buffer = lowered.emit(config).buffer
        (got,) = exir_lowering.load(buffer).run("forward", TOKENS)
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", ["8da4w", "float16"])
def test_few_bits_are_computed_as_executorch_computes_them(name: str) -> None:
    program = words(*FEW_BITS[name][0])
    theirs = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch().buffer
    ours = exir_lowering.lower(program, "xnnpack").emit().buffer
    expected, got = (exir_lowering.load(buffer).run("forward", TOKENS) for buffer in (theirs, ours))
    torch.testing.assert_close(got, expected, atol=1e-6 if name == "8da4w" else 2e-3, rtol=0)
