"""How fast a language model reads a prompt and generates: `python tests/benchmarks/generation.py`.

A Llama with random weights over a KV cache of 2,048 tokens, with XNNPACK, in float and in 8da4w (4-bit weights in
groups of 32). Three files with the same weights:
    executorch  ExecuTorch's own Llama, as its `export_llm` writes it: custom attention, and all that XNNPACK takes
    attention   transformers' Llama with the same attention, as the guide of language models registers it, by `lower`
    static      transformers' Llama and static cache as they are, by `lower`
Tokens per second of CPU time of one pinned core, the files in turns in one process, the best of the rounds: a prompt
of 64 and of 512 tokens, a token at position 64 and at 1,500, and `TextLLMRunner`, which reads 64 tokens and generates
64. Logits are compared with PyTorch's; the exit status is 1 if they are wrong. ExecuTorch takes minutes to write its
files: `--folder` keeps them.

    python tests/benchmarks/generation.py --size 20m --weights float --files attention,static --by kind
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from decoders import Decoder, export_methods
from kinds import PARTS
from latency import time_in_turns
from latency_engines import use_cores
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import exir_lowering

SIZES = {  # hidden size, layers, intermediate size, heads, heads of keys and values, vocabulary
    "tiny": (64, 1, 128, 4, 2, 512),
    "20m": (512, 4, 1536, 8, 4, 8192),
    "100m": (1024, 6, 3072, 16, 8, 16384),
}
CACHE = 2048
CALLS = {"prompt of 64": (64, 0), "prompt of 512": (512, 0), "token at 64": (1, 64), "token at 1,500": (1, 1500)}
"""What is measured: how many tokens, and where they begin."""
GENERATED = 64
WEIGHTS, FILES = ("float", "8da4w"), ("executorch", "attention", "static")
TOLERANCE = {"float": 1e-4, "8da4w": 0.2}
"""The error that logits may have, as a share of the largest: rounding in another order moves activations of 8 bits."""


def make_model(size: str, weights: str) -> LlamaForCausalLM:
    """Return a model with random weights, the same ones each time."""
    hidden, layers, middle, heads, shared, vocabulary = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=middle,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        vocab_size=vocabulary,
        max_position_embeddings=CACHE,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    if weights == "8da4w":
        from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
        from torchao.quantization.granularity import PerGroup
        from torchao.utils import unwrap_tensor_subclass

        quantize_(model, Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)))
        unwrap_tensor_subclass(model)
    return model


class Static(torch.nn.Module):
    """Transformers' model over its own static cache: tokens and the position of the first one to the last logits."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

        super().__init__()
        model.generation_config.update(cache_implementation="static")
        self.wrapped = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=CACHE)

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token."""
        for layer in self.wrapped.static_cache.layers:
            layer.cumulative_length.copy_(position[0])
        cache = self.wrapped.static_cache
        return self.wrapped.model(tokens, cache=cache, use_cache=True, logits_to_keep=1).logits[:, 0]


def metadata(vocabulary: int) -> dict[str, Any]:
    """Return what ExecuTorch's runner asks a file for."""
    lengths = {"get_max_seq_len": CACHE, "get_max_context_len": CACHE}
    options = {"use_kv_cache": True, "use_sdpa_with_kv_cache": True, "enable_dynamic_shape": True}
    return {"get_vocab_size": vocabulary, "get_eos_ids": [vocabulary], **lengths, **options}


def write_ours(module: torch.nn.Module, vocabulary: int, path: Path, strict: bool) -> None:
    """Write our file of a module that takes tokens and the position of the first one."""
    lowered = exir_lowering.lower(export_methods(module, CACHE, strict=strict), "xnnpack")
    lowered.emit(constant_methods=metadata(vocabulary)).save(path)


def write_executorch(size: str, weights: str, path: Path) -> None:
    """Write the file of ExecuTorch's `export_llm`, its best settings for a CPU, with the weights of `make_model`."""
    from executorch.examples.models.llama.export_llama_lib import export_llama
    from executorch.extension.llm.export.config.llm_config import LlmConfig

    hidden, layers, middle, heads, shared, vocabulary = SIZES[size]
    model = make_model(size, "float")
    names = {"dim": hidden, "n_layers": layers, "hidden_dim": middle, "n_heads": heads, "n_kv_heads": shared}
    # A checkpoint with "8da4w" in its path would be taken for one that is quantised already.
    params, checkpoint = path.with_name(f"{size}.json"), path.with_name(f"{size}.pth")
    params.write_text(json.dumps({**names, "vocab_size": vocabulary, "norm_eps": model.config.rms_norm_eps}))
    torch.save(meta_names(model.state_dict(), model.config.head_dim), checkpoint)
    options = LlmConfig()
    options.base.params, options.base.checkpoint = str(params), str(checkpoint)
    options.base.metadata = json.dumps({"get_eos_ids": [vocabulary]})
    options.model.use_kv_cache = options.model.use_sdpa_with_kv_cache = True
    options.backend.xnnpack.enabled = options.backend.xnnpack.extended_ops = True
    options.export.max_seq_length = options.export.max_context_length = CACHE
    options.export.output_name = str(path)
    if weights == "8da4w":
        options.quantization.qmode, options.quantization.group_size = "8da4w", 32
        options.quantization.use_hqq = False  # it searches for other scales
    export_llama(options)
    checkpoint.unlink()


def meta_names(weights: Mapping[str, torch.Tensor], turned: int | None = None) -> dict[str, torch.Tensor]:
    """Return weights by Meta's names, for its rotary embedding if it is that which turns neighbours in heads of a size.

    That of transformers turns halves.
    """
    layers = {
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
    }
    layers |= {"self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3"}
    layers |= {"mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm"}
    layers |= {"post_attention_layernorm": "ffn_norm"}
    layers |= {"self_attn.q_norm": "attention.q_norm_fn", "self_attn.k_norm": "attention.k_norm_fn"}
    found = {}
    for name, weight in weights.items():
        short = name.removeprefix("model.").replace("embed_tokens", "tok_embeddings").replace("lm_head", "output")
        for theirs, meta in layers.items():
            short = short.replace(theirs, meta)
        if turned and ("attention.wq" in short or "attention.wk" in short):
            weight = weight.view(-1, 2, turned // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        found[short] = weight
    return found


def make_files(size: str, weights: str, wanted: list[str], folder: Path) -> dict[str, Path]:
    """Return the files, and write those that the folder does not have."""
    paths = {name: folder / f"{size}_{weights}_{name}.pte" for name in wanted}
    for name, path in paths.items():
        if not path.exists():
            start = time.process_time()
            if name == "executorch":
                write_executorch(size, weights, path)
            elif name == "attention":
                write_ours(Decoder(make_model(size, weights), CACHE), SIZES[size][-1], path, strict=False)
            else:
                write_ours(Static(make_model(size, weights)), SIZES[size][-1], path, strict=True)
            print(f"{path.name}: {time.process_time() - start:.0f} s of CPU", file=sys.stderr, flush=True)
    return paths


def write_tokenizer(vocabulary: int, path: Path) -> None:
    """Write a tokenizer of one letter and many words that no text has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {"a": 0} | {f"w{number}": number for number in range(1, vocabulary)}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(path))


@contextmanager
def silent() -> Iterator[None]:
    """Keep back what ExecuTorch's runner prints, and show its end if the runner fails: only that says why."""
    sys.stdout.flush()
    kept = [os.dup(one) for one in (1, 2)]
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        for one in (1, 2):
            os.dup2(printed.fileno(), one)
        try:
            yield
        except RuntimeError as error:  # as runners raise it
            printed.seek(0)
            error.add_note(printed.read()[-2000:])
            raise
        finally:
            for one, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, one)
                os.close(copy)


def open_runner(path: Path, tokenizer: Path) -> Callable[[], str]:
    """Return what reads 64 tokens and generates as many in ExecuTorch's runner."""
    import executorch.kernels.quantized  # noqa: F401  (an embedding of 8 bits from `export_llm` needs its kernels)
    from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

    runner = TextLLMRunner(str(path), str(tokenizer))
    options = GenerationConfig(echo=False, max_new_tokens=GENERATED, temperature=0.0, num_bos=0)

    def generate() -> str:
        pieces: list[str] = []
        runner.reset()
        runner.generate("a" * 64, options, pieces.append)
        if len(pieces) != GENERATED:
            raise RuntimeError(f"{path.name} generated {len(pieces)} tokens, expected {GENERATED}.")
        return "".join(pieces)

    return generate


def measure(size: str, weights: str, paths: Mapping[str, Path], rounds: int, by: str | None) -> dict[str, Any]:
    """Measure files in turns."""
    programs = {name: exir_lowering.load(path) for name, path in paths.items()}
    torch.manual_seed(1)
    eager = Decoder(make_model(size, weights), CACHE)
    row: dict[str, Any] = {"mb": {name: path.stat().st_size / 1e6 for name, path in paths.items()}}
    row |= {"errors": dict.fromkeys(paths, 0.0), "ms": {}, "parts": {}}
    methods = {name: "step" if "step" in one.method_names else "forward" for name, one in programs.items()}
    for call, (count, start) in CALLS.items():
        inputs = torch.randint(SIZES[size][-1], (1, count)), torch.tensor([start])
        with torch.no_grad():
            expected = eager(*inputs)
        chosen = {name: "forward" if count > 1 else method for name, method in methods.items()}
        runs = {name: partial(one.run, chosen[name], *inputs) for name, one in programs.items()}
        for name, run in runs.items():
            error = float((run()[0] - expected).abs().max() / expected.abs().max())
            row["errors"][name] = max(row["errors"][name], error)
        row["ms"][call] = time_in_turns(runs, rounds if count > 1 else rounds * 10)
        if by:
            found = {name: one.profile(chosen[name], *inputs, runs=rounds) for name, one in programs.items()}
            row["parts"][call] = {name: PARTS[by](profile) for name, profile in found.items()}
    with tempfile.TemporaryDirectory() as folder, silent():
        tokenizer = Path(folder) / "tokenizer.json"
        write_tokenizer(SIZES[size][-1], tokenizer)
        runners = {name: open_runner(path, tokenizer) for name, path in paths.items()}
        row["texts"] = {name: run() for name, run in runners.items()}
        row["ms"]["TextLLMRunner"] = time_in_turns(runners, rounds)
    return row


def show(rows: Mapping[str, Mapping[str, Any]], rounds: int) -> None:
    """Print tables."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    for weights, row in rows.items():
        names = [*row["mb"]]
        table = Table(title=f"{weights}: tokens per second of CPU time on one core, the best of {rounds} rounds")
        for column in ("", *names, *(f"{name} / executorch" for name in names[1:] if names[0] == "executorch")):
            table.add_column(column, justify="right")
        for call, taken in row["ms"].items():
            count = CALLS[call][0] if call in CALLS else GENERATED + 64
            speeds = {name: count / one["cpu_min"] * 1e3 for name, one in taken.items()}
            ratios = [f"{speeds[name] / speeds[names[0]]:.2f}" for name in names[1:] if names[0] == "executorch"]
            table.add_row(call, *(f"{speeds[name]:,.1f}" for name in names), *ratios)
        table.add_row("MB", *(f"{row['mb'][name]:,.1f}" for name in names))
        table.add_row("error", *(f"{row['errors'][name]:.1e}" for name in names))
        console.print(table)
        first = row["texts"][names[0]]
        print("TextLLMRunner: other text than the first file's:", [one for one in names if row["texts"][one] != first])
        for call, parts in row["parts"].items():
            for name, found in parts.items():
                print(call, name, {part: round(taken, 3) for part, taken in found.items()})


def main() -> int:
    """Run the benchmark; return 1 if logits are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="20m")
    parser.add_argument("--weights", default=",".join(WEIGHTS), help="float, 8da4w, or both")
    parser.add_argument("--files", default=",".join(FILES), help="which files, with commas between them")
    parser.add_argument("--rounds", type=int, default=5, help="calls of each file; the fastest one counts")
    parser.add_argument("--by", choices=PARTS, help="also what each call is spent on, in milliseconds")
    parser.add_argument("--folder", type=Path, help="where files are kept, and taken from if they are there")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        chosen = given.weights.split(",")
        made = {one: make_files(given.size, one, given.files.split(","), folder) for one in chosen}
        for weights, paths in made.items():
            use_cores(1)
            rows[weights] = measure(given.size, weights, paths, given.rounds, given.by)
    show(rows, given.rounds)
    if given.json:
        given.json.write_text(json.dumps({"size": given.size, "rows": rows}, indent=1))
    return int(any(not error < TOLERANCE[weights] for weights, row in rows.items() for error in row["errors"].values()))


if __name__ == "__main__":
    sys.exit(main())
