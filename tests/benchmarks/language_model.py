"""A language model from programs to saved files, ExecuTorch's engine and ours, each in a process of its own.

`python tests/benchmarks/language_model.py [--size 309m] [--external] [--folder DIR] [--json FILE]`: a Llama with random
weights from transformers, two methods (64 tokens, and one token over the same static cache), XNNPACK. `--external` puts
weights into a `.ptd` file. Peak memory is the most that the process had above what it had with the exported programs.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

SIZES = {  # hidden size, layers, intermediate size, heads, heads of keys and values, vocabulary
    "tiny": (64, 1, 128, 4, 2, 500),
    "8m": (256, 4, 1024, 8, 4, 8000),
    "70m": (512, 8, 2048, 8, 4, 28000),
    "309m": (1024, 16, 4096, 16, 8, 28000),
    "1200m": (2048, 16, 8192, 32, 8, 55000),
}
ENGINES = ("executorch", "ours")
STEPS = ("lower", "emit", "save")
CACHE, PROMPT = 256, 64


def export_methods(size: str, tied: bool) -> tuple[dict[str, Any], int]:
    """Return the methods of a model, and how many bytes its weights have."""
    import torch
    from torch.export import export
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    hidden, layers, middle, heads, shared, vocabulary = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=middle,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=CACHE,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.generation_config = GenerationConfig(use_cache=True, cache_implementation="static")
    module = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=CACHE)
    programs = {}
    for name, count in (("prefill", PROMPT), ("decode", 1)):
        given = {"input_ids": torch.zeros(1, count, dtype=torch.long), "cache_position": torch.arange(count)}
        with torch.no_grad():
            programs[name] = export(module, (), given, strict=True)  # the cache is in no module
    return programs, sum(weight.nbytes for weight in model.parameters())


def executorch(programs: dict[str, Any], external: bool, path: Path) -> Any:
    """Yield after each step of ExecuTorch's way."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower

    if external:  # what ExecuTorch's pass for this writes
        for program in programs.values():
            for node in program.graph.nodes:
                if node.op == "placeholder":
                    node.meta.setdefault("custom", {})["delegate_constant_tag"] = "weights"
    edge = to_edge_transform_and_lower(programs, partitioner={name: [XnnpackPartitioner()] for name in programs})
    yield
    config = ExecutorchBackendConfig(external_constants=(lambda node: "weights") if external else False)
    made = edge.to_executorch(config)
    yield
    with path.open("wb") as file:
        made.write_to_file(file)
    made.write_tensor_data_to_file(str(path.parent))
    yield


def ours(programs: dict[str, Any], external: bool, path: Path) -> Any:
    """Yield after each step of our way."""
    from exir_lowering import lower

    lowered = lower(programs, "xnnpack")
    yield
    artifact = lowered.emit(external_weights="weights" if external else None)
    yield
    artifact.save(path)
    yield


def status(field: str) -> int:
    """Return a figure of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"{field} is not in /proc/self/status: this benchmark needs Linux")


def measure(engine: str, size: str, external: bool, tied: bool, folder: Path) -> dict[str, Any]:
    """Return the CPU seconds of the steps, the peak memory and the size of the files."""
    for warm in (("tiny", folder / "warm.pte"), None):  # what is imported and made once per process is in neither
        programs, weights = export_methods(warm[0] if warm else size, tied)
        gc.collect()
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is in use
        path = warm[1] if warm else folder / f"{engine}.pte"
        run = {"executorch": executorch, "ours": ours}[engine](programs, external, path)
        row: dict[str, Any] = {"engine": engine, "weights": weights}
        for step in STEPS:
            wall, start = time.perf_counter(), time.process_time()
            next(run)
            row[step], row[f"{step}_wall"] = time.process_time() - start, time.perf_counter() - wall
            row[f"{step}_peak"] = status("VmHWM") - before
        if warm:
            del run, programs
    row["total"] = sum(row[step] for step in STEPS)
    row["peak"] = row["save_peak"]
    row["files"] = {one.name: one.stat().st_size for one in folder.iterdir() if one.stem in (engine, "weights")}
    return row


def main() -> None:
    """Measure both engines, one after the other, and print a table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="309m")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="only this one")
    parser.add_argument("--external", action="store_true", help="weights go into a .ptd file")
    parser.add_argument("--tied", action="store_true", help="the output layer has the weight of the embedding")
    parser.add_argument("--folder", type=Path, help="where files go while it runs: a disk with enough space")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        warnings.simplefilter("ignore")
        row = measure(given.engine[0], given.size, given.external, given.tied, given.folder)
        print(json.dumps(row))
        return
    options = [f"--{name}" for name in ("external", "tied") if getattr(given, name)]
    rows = []
    for engine in given.engine or ENGINES:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            command = [sys.executable, __file__, "--child", "--engine", engine, "--size", given.size, *options]
            done = subprocess.run([*command, "--folder", folder], stdout=subprocess.PIPE, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    show(given.size, rows)
    if given.json:
        given.json.write_text(json.dumps({"size": given.size, "options": options, "rows": rows}, indent=1))


def show(size: str, rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Llama of {rows[0]['weights'] / 4e6:,.0f} M parameters ({size}), float32: CPU seconds")
    for column in ("", *STEPS, "total", "peak memory / weights", "files / weights"):
        table.add_column(column, justify="right")
    for row in rows:
        figures = [f"{row[step]:.1f} ({row[f'{step}_wall']:.1f} wall)" for step in STEPS]
        relative = [f"{row['peak'] / row['weights']:.2f}", f"{sum(row['files'].values()) / row['weights']:.3f}"]
        table.add_row(row["engine"], *figures, f"{row['total']:.1f}", *relative)
    Console(width=140).print(table)
    if len(rows) == len(ENGINES):
        first, second = rows
        print({step: round(first[step] / second[step], 2) for step in (*STEPS, "total", "peak")})


if __name__ == "__main__":
    main()
