"""What torch.compile costs with this project: `python tests/benchmarks/compiled.py`.

How long models take to compile, and per call, with XNNPACK in inference: CPU time on one pinned core, all backends of
torch.compile in turns in one process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import torch
from latency_engines import use_cores
from latency_models import MODELS as LATENCY_MODELS
from lowering_engines import FakeResults, forget
from rich.console import Console
from rich.table import Table
from torch._inductor import config as inductor_config

from exir_lowering.dynamo import backend, reports

BASE = "aot_eager"
CHECKS = ("sample", "content", "frozen")
MODELS = ("resnet18", "vit_tiny", "bert_mini", "llama_decode")
_FAKES = FakeResults()

Run = Callable[[], Any]
Row = dict[str, Any]


def compiled(model: Any, how: Any, **options: Any) -> Any:
    """Return a function as torch.compile compiles it; options are for our backend."""
    settings = {} if isinstance(how, str) else {"options": {"fallback": None, **options}}
    return torch.compile(model, backend=how, fullgraph=True, dynamic=False, **settings)


def in_turns(runs: Mapping[str, Run], rounds: int) -> dict[str, list[float]]:
    """Return CPU seconds of each run in each round, after one that does not count, without garbage collections."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds + 1):
            for name, run in runs.items():
                start = time.process_time()
                run()
                if turn:
                    found[name].append(time.process_time() - start)
    finally:
        gc.enable()
    return found


class Keeping:
    """Our backend, which keeps what it compiled: `torch._dynamo.reset()` forgets only what Dynamo keeps."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, module: Any, inputs: Any, *, options: Any) -> Any:
        """Compile a graph."""
        self.kept.append(backend(module, inputs, options=options))
        return self.kept[-1]


def measure_model(name: str, rounds: int) -> Row:
    """Measure how long a model takes to compile, in CPU seconds, and per call, in CPU milliseconds."""
    built = LATENCY_MODELS[name]()
    model, inputs = built.model, built.inputs
    expected = model(*inputs)
    keeping = Keeping()
    seconds: dict[str, float] = {}

    def first_call(label: str, how: Any, **options: Any) -> Run:
        called = partial(compiled(model, how, **options), *inputs)
        gc.collect()
        start = _cpu_seconds()
        found = called()
        seconds[label] = _cpu_seconds() - start
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        return called

    ours = partial(first_call, how=backend, partitioners="xnnpack")
    _forget()
    first_call("tried", BASE)  # torch's and transformers' own first time
    _forget()
    first_call(BASE, BASE)
    _forget(conversions=True)
    ours("first")
    share = _share()
    _forget()
    first_call("again", keeping, partitioners="xnnpack")
    torch._dynamo.reset()
    runs: dict[str, Run] = {"no torch.compile": partial(model, *inputs), CHECKS[0]: ours("kept")}
    runs.update({how: ours(how, check_weights=how) for how in CHECKS[1:]})
    runs[BASE] = first_call("again, aot_eager", BASE)
    failure = ""
    try:
        with inductor_config.patch(compile_threads=1, force_disable_caches=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runs["inductor"] = first_call("inductor", "inductor")
    except MemoryError:
        raise
    except Exception as error:
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    found = in_turns(runs, rounds)
    ms = {one: {"least": min(times) * 1e3, "median": statistics.median(times) * 1e3} for one, times in found.items()}
    return {"model": name, "delegated": share, "compile_s": seconds, "ms": ms, "inductor_failed": failure}


def _forget(*, conversions: bool = False) -> None:
    """Forget what was compiled; with `conversions`, also what the Edge conversion remembers in a process."""
    torch._dynamo.reset()
    if conversions:
        forget()
        _FAKES.restore()
    for _ in range(2):  # what the first one ends may hold something that was in a cycle
        gc.collect()


def _share() -> float:
    methods = [method for report in reports() for _, one in report.reports for method in one.methods]
    return sum(method.delegated for method in methods) / sum(len(method.nodes) for method in methods)


def _cpu_seconds() -> float:
    spent = os.times()  # with those of the C++ compiler that inductor calls
    return spent.user + spent.system + spent.children_user + spent.children_system


def show_models(console: Console, rows: Sequence[Row]) -> None:
    """Print the tables of models."""
    table = Table(title="Time to compile: the first call, CPU s")
    labels = {
        BASE: BASE,
        "inductor": "inductor",
        "first": "xnnpack, first",
        "again": "again",
        "kept": "while a copy is in use",
    }
    for column in ("model", *labels.values(), "operators delegated"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        values = [f"{row['compile_s'][label]:.2f}" if label in row["compile_s"] else "" for label in labels]
        table.add_row(row["model"], *values, f"{row['delegated']:.0%}")
    console.print(table)
    table = Table(title="One call, CPU ms, least and median of the rounds; XNNPACK with each check of weights")
    engines = ("no torch.compile", BASE, "inductor", *CHECKS)
    for column in ("model", *engines):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        found = [row["ms"].get(name) for name in engines]
        table.add_row(row["model"], *(f"{one['least']:.2f} {one['median']:.2f}" if one else "failed" for one in found))
    console.print(table)
    for row in rows:
        if row["inductor_failed"]:
            console.print(f"{row['model']}, inductor: {row['inductor_failed']}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--quick", action="store_true", help="fewer runs, and one model")
    arguments = parser.parse_args()
    use_cores(1)
    console = Console(width=None if sys.stdout.isatty() else 140)
    figures: dict[str, list[Row]] = {}
    with torch.no_grad():
        names = MODELS[-1:] if arguments.quick else MODELS
        figures["models"] = [measure_model(name, 5 if arguments.quick else 20) for name in names]
    show_models(console, figures["models"])
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
