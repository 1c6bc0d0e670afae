"""What `exir-lower lower --llm --quantise 8da4w` makes and takes: `python tests/benchmarks/shipped_llm.py`.

Folders of transformers models with random weights, a KV cache of 2,048 tokens, XNNPACK. For each architecture, beside
ExecuTorch's `export_llm` of the same weights (8da4w in groups of 32, embedding of 8 bits):
    file / weights    bytes of the file over those of the quantised weights and their scales, each once
    peak / weights    the most memory of the command, above a process that did the same with a tiny model, over the
                      bytes of the float32 weights
    CPU seconds       of a whole process, with imports: from the folder, or the checkpoint, to the file
    tokens / s        `TextLLMRunner`, a prompt of 64 tokens and 64 that are generated, CPU time of one pinned core
    error             of the last logits of 64 different tokens, beside the float model's in PyTorch: the root of the
                      mean square over theirs. It is that of rounding, of ours and of ExecuTorch's file, or large if
                      the file computes another model
    equal tokens      how many of those 64 are, from the first on, the greedy tokens of the quantised model in PyTorch;
                      and of that model with norms that differ by 5e-7: the logits of random weights lie close together

ExecuTorch's own transformer has no norms after attention and feed-forward, and no window, as Gemma3 has; and it rotates
in all layers of SmolLM3. Its files of these two do not compute these models: Gemma3's has less to do. An output layer
that shares its weight with the embedding, as in Qwen3 and SmolLM3, has 4 bits in its files and a weight of its own; in
ours it has 8, and one weight is there for both.

    python tests/benchmarks/shipped_llm.py --size 20m --architectures Llama,Qwen3 --without-executorch
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

SIZES = {  # hidden size, layers, intermediate size, heads, heads of keys and values, vocabulary
    "tiny": (64, 2, 128, 4, 2, 512),
    "20m": (512, 4, 1536, 8, 4, 8192),
    "100m": (1024, 6, 3072, 16, 8, 16384),
    "300m": (1024, 20, 3072, 16, 8, 32768),
}
CONTEXT, PROMPT = 2048, 64
HF_ROPE = {"use_hf_rope": True}
NORMS = {"use_qk_norm": True, "qk_norm_before_rope": True, **HF_ROPE}
PARAMS: dict[str, dict[str, Any]] = {  # what ExecuTorch's own transformer needs to be of an architecture
    "Llama": {},
    "Qwen3": NORMS,
    "Gemma3": {**NORMS, "post_attention_norm": True, "post_ffn_norm": True, "act_fn": "gelu_approx"},
    "SmolLM3": {**HF_ROPE, "no_rope_layer_interval": 4},
    "Phi3": HF_ROPE,
}
GEMMA3_NORMS = {  # that others do not have, or where others have another one
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffn_norm",
}


def sizes_of(size: str) -> dict[str, int]:
    hidden, layers, middle, heads, shared, vocabulary = SIZES[size]
    names = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": middle}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": shared, "head_dim": hidden // heads}
    return {**names, **heads_of, "vocab_size": vocabulary, "max_position_embeddings": CONTEXT}


def make_model(architecture: str, size: str) -> Any:
    """Return a model with random weights, the same ones each time."""
    import language_models

    layers = SIZES[size][1]
    vocabulary = SIZES[size][-1]
    more: dict[str, Any] = {"initializer_range": 0.02, "eos_token_id": vocabulary}  # no text ends early
    more |= {"pad_token_id": vocabulary - 1}  # whose embedding is zero: not the token of the prompt
    if architecture == "Gemma3":
        kinds = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(layers)]
        more |= {"sliding_window": 512, "layer_types": kinds, "query_pre_attn_scalar": SIZES[size][0] // SIZES[size][3]}
    if architecture == "SmolLM3":
        more |= {"no_rope_layers": [int(layer % 4 != 3) for layer in range(layers)]}
    return language_models.make_model(architecture, **sizes_of(size), **more)


def save_folder(architecture: str, size: str, folder: Path) -> dict[str, int]:
    """Write a folder of transformers; return the bytes of the weights in float and quantised, each once."""
    from generation import write_tokenizer
    from language_models import quantised

    model = make_model(architecture, size)
    model.save_pretrained(folder)
    write_tokenizer(SIZES[size][-1], folder / "tokenizer.json")
    held: dict[int, int] = {}
    for weight in quantised(model, "8da4w").parameters():
        data, bits = getattr(weight, "qdata", weight), 4 if "int4" in str(getattr(weight, "target_dtype", "")) else 8
        held[hash(data.numpy().tobytes())] = data.nbytes * bits // 8
        if data is not weight:
            held[hash(weight.scale.float().numpy().tobytes())] = weight.scale.nbytes
    return {"float": sum(one.nbytes for one in model.parameters()), "quantised": sum(held.values())}


def write_checkpoint(architecture: str, size: str, folder: Path) -> None:
    """Write the same weights as `executorch.pth`, by Meta's names, and what ExecuTorch's transformer is to be."""
    import torch
    from generation import meta_names

    model = make_model(architecture, size)
    config, weights = model.config, {}
    for name, weight in model.state_dict().items():
        if architecture == "Gemma3":  # its norms multiply by one more than their weights, and it scales the embedding
            weight = weight + 1 if weight.ndim == 1 else weight
            weight = weight * config.hidden_size**0.5 if "embed_tokens" in name else weight
            for theirs, meta in GEMMA3_NORMS.items():
                name = name.replace(theirs, meta)
        weights |= _split(name, weight, config)
    turned = None if "use_hf_rope" in PARAMS[architecture] else config.head_dim
    torch.save(meta_names(weights, turned), folder / "executorch.pth")
    rope = config.rope_parameters.get("sliding_attention", config.rope_parameters)
    hidden, layers, middle, heads, shared, vocabulary = SIZES[size]
    params = {"dim": hidden, "n_layers": layers, "hidden_dim": middle, "n_heads": heads, "n_kv_heads": shared}
    params |= {"vocab_size": vocabulary, "norm_eps": config.rms_norm_eps, "rope_theta": rope["rope_theta"]}
    (folder / "executorch.json").write_text(json.dumps({**params, **PARAMS[architecture]}))


def _split(name: str, weight: Any, config: Any) -> dict[str, Any]:
    """Return the parts of a weight that Phi3 has in one piece, by the names that others have for them."""
    shared = config.num_key_value_heads * config.head_dim
    fused = {"qkv_proj": {"q_proj": config.num_attention_heads * config.head_dim, "k_proj": shared, "v_proj": shared}}
    fused["gate_up_proj"] = dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size)
    for whole, parts in fused.items():
        if whole in name:
            pieces = weight.split([*parts.values()])
            return {name.replace(whole, part): piece for part, piece in zip(parts, pieces, strict=True)}
    return {name: weight}


def ours(folder: Path, target: Path) -> None:
    """Run the command."""
    from exir_lowering import cli

    options = ["--quantise", "8da4w", "--max-context", str(CONTEXT), "--no-cache"]
    if cli.main(["lower", "--llm", str(folder), "-o", str(target), *options]):
        raise SystemExit("exir-lower lower failed")


def executorch(size: str, target: Path) -> None:
    """Run ExecuTorch's `export_llm` on the checkpoint beside the target, its best settings for a CPU."""
    from executorch.examples.models.llama.export_llama_lib import export_llama
    from executorch.extension.llm.export.config.llm_config import LlmConfig

    options = LlmConfig()
    options.base.params, options.base.checkpoint = str(target.with_suffix(".json")), str(target.with_suffix(".pth"))
    options.base.metadata = json.dumps({"get_eos_ids": [SIZES[size][-1]]})
    options.model.use_kv_cache = options.model.use_sdpa_with_kv_cache = True
    options.backend.xnnpack.enabled = options.backend.xnnpack.extended_ops = True
    options.export.max_seq_length = options.export.max_context_length = CONTEXT
    options.export.output_name = str(target)
    options.quantization.qmode, options.quantization.group_size = "8da4w", 32
    options.quantization.embedding_quantize, options.quantization.use_hqq = "8,0", False
    export_llama(options)


def child(given: argparse.Namespace) -> dict[str, Any]:
    """Make one file; return what that took."""
    from language_model import status

    found: dict[str, Any] = {}
    if given.child == "peak":
        with tempfile.TemporaryDirectory() as warm:
            save_folder(given.architectures, "tiny", Path(warm) / "model")
            ours(Path(warm) / "model", Path(warm) / "tiny.pte")
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is in use
    if given.child == "executorch":
        executorch(given.size, given.folder / "executorch.pte")
    else:
        ours(given.folder / "model", given.folder / "ours.pte")
    if given.child == "peak":
        found["peak"] = status("VmHWM") - before
    return {**found, "cpu": time.process_time()}


def measure(architecture: str, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Make the files of an architecture, and run them."""
    from generation import GENERATED, open_runner, silent
    from language_models import quantised, rounded_otherwise
    from latency import time_in_turns
    from latency_engines import use_cores
    from tokenizers import Tokenizer

    row: dict[str, Any] = {"weights": save_folder(architecture, given.size, folder / "model")}
    if not given.without_executorch:
        write_checkpoint(architecture, given.size, folder)
    for engine in ("ours", "peak") if given.without_executorch else ("ours", "peak", "executorch"):
        command = [sys.executable, __file__, "--child", engine, "--architectures", architecture, "--size", given.size]
        done = subprocess.run([*command, "--folder", folder], capture_output=True, text=True)
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
            row[engine] = None
            continue
        row[engine] = json.loads(done.stdout.splitlines()[-1])
        print(architecture, engine, row[engine], file=sys.stderr, flush=True)
    paths = {name: folder / f"{name}.pte" for name in ("ours", "executorch") if (folder / f"{name}.pte").exists()}
    row["bytes"] = {name: path.stat().st_size for name, path in paths.items()}
    use_cores(1)
    tokenizer = folder / "tokenizer.json"
    with silent():
        runners = {name: open_runner(path, tokenizer) for name, path in paths.items()}
        text = runners["ours"]()
        taken = time_in_turns(runners, given.rounds)
    row["speed"] = {name: (PROMPT + GENERATED) / one["cpu_min"] * 1e3 for name, one in taken.items()}
    model, decode = make_model(architecture, given.size), Tokenizer.from_file(str(tokenizer)).decode
    expected = generate(quantised(model, "8da4w"), GENERATED)
    rounded = generate(rounded_otherwise(quantised(model, "8da4w"), 0), GENERATED)
    row["error"] = {name: logits_error(model, path) for name, path in paths.items()}
    parts = [decode(expected[:count]) for count in range(GENERATED + 1)]
    row["equal"] = max(count for count in range(GENERATED + 1) if text.startswith(parts[count]))
    row["equal_in_pytorch"] = next((at for at, one in enumerate(expected) if one != rounded[at]), GENERATED)
    return row


def logits_error(model: Any, path: Path) -> float:
    """Return the error of a file's logits after different tokens: the root of its mean square over the model's."""
    import torch

    import exir_lowering

    torch.manual_seed(1)
    tokens = torch.randint(model.config.vocab_size, (1, PROMPT))
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits[0, -1]
    got = exir_lowering.load(path).run("forward", tokens, torch.tensor([0]))[0].flatten()
    return float((got - expected).norm() / expected.norm())


def generate(model: Any, count: int) -> list[int]:
    """Return the greedy tokens after the prompt of `open_runner`, in PyTorch, without a cache of ours."""
    import torch

    with torch.no_grad():
        options = {"do_sample": False, "max_new_tokens": count, "eos_token_id": None}
        return model.generate(torch.zeros(1, PROMPT, dtype=torch.long), **options)[0, PROMPT:].tolist()


def show(rows: dict[str, dict[str, Any]], size: str) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{size}, 8da4w, cache of {CONTEXT} tokens")
    columns = ("float MB", "file MB", "file / weights", "peak / weights", "CPU s", "export_llm", "ratio", "its MB")
    for column in ("", *columns, "tokens/s", "export_llm", "error", "export_llm", "equal tokens"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        weights, its = row["weights"], row.get("executorch")
        cells = [f"{weights['float'] / 1e6:.0f}", f"{row['bytes']['ours'] / 1e6:.1f}"]
        cells += [f"{row['bytes']['ours'] / weights['quantised']:.3f}", f"{row['peak']['peak'] / weights['float']:.2f}"]
        cells += [f"{row['ours']['cpu']:.0f}", f"{its['cpu']:.0f}" if its else "-"]
        cells += [f"{its['cpu'] / row['ours']['cpu']:.1f}x", f"{row['bytes']['executorch'] / 1e6:.1f}"] if its else "--"
        cells += [f"{row['speed'][one]:.0f}" if one in row["speed"] else "-" for one in ("ours", "executorch")]
        cells += [f"{row['error'][one]:.3f}" if one in row["error"] else "-" for one in ("ours", "executorch")]
        table.add_row(name, *cells, f"{row['equal']}, {row['equal_in_pytorch']}")
    Console(width=150).print(table)


def main() -> int:
    """Run the benchmark; return 1 if the first token of an architecture is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="100m")
    parser.add_argument("--architectures", default=",".join(PARAMS), help="which, with commas between them")
    parser.add_argument("--without-executorch", action="store_true", help="its export takes minutes")
    parser.add_argument("--rounds", type=int, default=5, help="texts of each file; the fastest one counts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=("ours", "peak", "executorch"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(given)))
        return 0
    rows: dict[str, dict[str, Any]] = {}
    for architecture in given.architectures.split(","):
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            rows[architecture] = measure(architecture, given, Path(folder))
        show(rows, given.size)
        if given.json:
            given.json.write_text(json.dumps({"size": given.size, "rows": rows}, indent=1))
    return int(not all(row["equal"] > 0 for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
