"""What each precision costs and gains: `python tests/benchmarks/precisions.py`, on Debian 12 for the counts on ARM.

A model in float, in half floats as `model.half()` and `model.bfloat16()` make them, and in what `quantize` makes: the
size of the file, the error beside the float program that `verify` measures, CPU milliseconds of a call on one core (in
turns in one process; the least counts), and millions of instructions of a call on ARM's kernels (`arm.py`).

    python tests/benchmarks/precisions.py --models minilm,llama --arm
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "device"))

import torch
from arm import Arm, pack
from latency import time_in_turns
from latency_engines import first_line, use_cores
from lowering_models import Built
from peer_files import default_folder
from peer_models import MODELS
from rich.console import Console
from rich.table import Table
from torch.export import ExportedProgram, export

import exir_lowering
from exir_lowering.cli import demo

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
QUANTISED = ("int8", "8da8w", "8da4w")
PRECISIONS = ("float", *HALF, *QUANTISED)
_CALLS = 4
"""Calls that the ranges of int8 are taken from; errors are measured on others."""


class Cast(torch.nn.Module):
    """A model in half floats, which takes and returns float32 as the float program does."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model.to(dtype), dtype

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the model."""
        outputs = self.model(*(one.to(self.dtype) if one.is_floating_point() else one for one in inputs))
        return tuple(one.float() for one in ([outputs] if isinstance(outputs, torch.Tensor) else outputs))


def trained() -> Built:
    """Build all-MiniLM-L6-v2 with its trained weights, for 128 tokens; it needs the extra `demo`."""
    model, tokenizer = demo.load_model()
    return Built(model, _sentence(tokenizer, demo.SENTENCES[3]))


def _sentence(tokenizer: Any, text: str) -> tuple[torch.Tensor, ...]:
    found = tokenizer(text, padding="max_length", max_length=128, truncation=True, return_tensors="pt")
    return found["input_ids"], found["attention_mask"]


SUBJECTS: dict[str, Callable[[], Built]] = {"minilm_trained": trained, **MODELS}
DEFAULT = ("minilm_trained", "llama", "decode", "mobilenet_v2")


def build(name: str) -> Built:
    """Build a model, with the same weights and inputs each time."""
    torch.manual_seed(0)
    return SUBJECTS[name]()


def draw(name: str, built: Built) -> list[tuple[torch.Tensor, ...]]:
    """Return inputs like those of a model: other sentences, or noise and tokens."""
    if name == "minilm_trained":
        tokenizer = demo.load_model()[1]
        return [_sentence(tokenizer, text) for text in demo.SENTENCES[:3]]
    torch.manual_seed(1)

    def other(one: torch.Tensor) -> torch.Tensor:
        if one.is_floating_point():
            return torch.randn_like(one)
        return torch.randint_like(one, 1, 8000) if one.numel() > 1 else one  # not a position

    return [tuple(map(other, built.inputs)) for _ in range(_CALLS)]


def make_program(name: str, precision: str, program: ExportedProgram) -> ExportedProgram:
    """Return the program of a model in a precision."""
    if precision in HALF:
        built = build(name)
        return export(Cast(built.model, HALF[precision]).eval(), built.inputs)
    if precision in QUANTISED:
        calls = draw(name, build(name)) if precision == "int8" else None
        return exir_lowering.quantize(program, calls, precision=precision).program
    return program


def measure(name: str, arguments: argparse.Namespace, own: Path, arm: Arm | None) -> dict[str, dict[str, Any]]:
    """Measure a model in each precision."""
    built = build(name)
    inputs, rows, runs = [one.contiguous() for one in built.inputs], dict[str, dict[str, Any]](), {}
    program = export(built.model, built.inputs)
    for precision in arguments.precisions:
        row = rows[precision] = {}
        try:
            made = make_program(name, precision, program)
            artifact = exir_lowering.lower(made, "xnnpack").emit()
        except exir_lowering.LoweringError as error:
            row["failure"] = first_line(error)
            continue
        artifact.save(path := own / f"{name}-{precision}.pte")
        found = exir_lowering.verify(path, program, [tuple(inputs)], tolerance=10.0).methods["forward"]
        row["MB"], row["SQNR"] = path.stat().st_size / 1e6, min((one.sqnr for one in found.outputs), default=math.nan)
        row["problem"] = found.problem or next((one.problem for one in found.outputs if one.problem), "")
        if found.problem:
            continue  # it does not run
        runs[precision] = partial(exir_lowering.load(path).run, "forward", *inputs)
    for precision, taken in time_in_turns(runs, arguments.rounds).items():
        rows[precision]["ms"] = taken["cpu_min"]
    for precision in runs if arm else ():
        try:
            rows[precision]["M"] = arm.count("ours", own / f"{name}-{precision}.pte", pack(inputs))[0] / 1e6
        except RuntimeError as error:
            rows[precision]["problem"] += f" ARM: {error}"
    return rows


def report(rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Print the table, and what failed."""
    columns = {"MB": "MB of the file", "SQNR": "SQNR, dB", "ms": "CPU ms, x86", "M": "M instructions, ARM"}
    table = Table(title="What each precision costs and gains")
    for column in ("model", "precision", *columns.values()):
        table.add_column(column, justify="right" if column in columns.values() else "left")
    for name, found in rows.items():
        for precision, row in found.items():
            texts = (f"{row[key]:,.1f}" if math.isfinite(row.get(key, math.nan)) else "-" for key in columns)
            table.add_row(name, precision, *texts)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    for name, found in rows.items():
        for precision, row in found.items():
            if said := row.get("failure") or row.get("problem"):
                print(f"{name}, {precision}: {said}")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(DEFAULT), help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help=f"of {', '.join(PRECISIONS)}")
    parser.add_argument("--rounds", type=int, default=10, help="calls of each file; the fastest one counts")
    parser.add_argument("--arm", action="store_true", help="count instructions on ARM's kernels, too")
    parser.add_argument("--folder", type=Path, default=default_folder("arm"), help="where that is set up")
    parser.add_argument("--keep", type=Path, help="a folder for the files")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    arguments.precisions = arguments.precisions.split(",")
    arm = Arm(arguments.folder) if arguments.arm else None
    warnings.simplefilter("ignore")
    use_cores(1)
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as own:
            rows[name] = measure(name, arguments, arguments.keep or Path(own), arm)
        print(name, rows[name], file=sys.stderr, flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=2))
    report(rows)


if __name__ == "__main__":
    main()
