"""From a program to a `.pte` with XNNPACK, beside ExecuTorch's own way: `python tests/benchmarks/lowering.py`.

CPU seconds, interleaved, in one run. Modes:
    cold   the first lowering of the model, in a process that has lowered another one
    again  later lowerings of the same model in that process
    fresh  the first lowering in a fresh process, imports included
The payloads of all delegates, the operators on the host and the outputs in ExecuTorch's runtime are compared too.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from lowering_engines import ENGINES, STEPS, FakeResults, Lowered, forget, run
from lowering_models import GROWTH, ISSUE, MODELS, OTHERS, Built, export_model
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.export import export

import exir_lowering

MODES = ("cold", "again", "fresh")
BASE = "executorch"
Seconds = dict[str, list[dict[str, float]]]


class _Small(nn.Module):
    """What the process lowers first."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.relu(self.convolution(x)).mean((2, 3))).softmax(-1)


def compare(found: Lowered, expected: Lowered, built: Built) -> list[str]:
    """Return what is different in the results of two engines: payloads, operators on the host, outputs."""
    different = [
        f"delegates ({what})"
        for what in ("processed_bytes", "compile_specs", "named_data_store_output")
        if [getattr(d, what) for d in found.delegates] != [getattr(d, what) for d in expected.delegates]
    ]
    if sorted(found.operators) != sorted(expected.operators):
        different.append("operators on the host")
    outputs = [exir_lowering.load(one.buffer).run("forward", *built.inputs) for one in (found, expected)]
    if not all(torch.equal(*pair) for pair in zip(*outputs, strict=True)):
        different.append("outputs")
    return different


def _save(seconds: Seconds, engine: str, lowered: Lowered | dict[str, float]) -> None:
    seconds.setdefault(engine, []).append(lowered if isinstance(lowered, dict) else lowered.seconds)


def measure_here(
    name: str, engines: Sequence[str], modes: Sequence[str], repeat: int
) -> tuple[dict[str, Seconds], dict[str, list[str]]]:
    """Measure the modes that this process can, for one model; and compare what the engines made.

    Returns:
        Seconds by mode and engine, and the differences to ExecuTorch's result by engine.
    """
    program, built = export_model(name)
    found: dict[str, Seconds] = {mode: {} for mode in modes}
    results: dict[str, Lowered] = {}
    fakes = FakeResults()
    if "cold" in modes:
        for turn in range(repeat):
            for engine in engines if turn % 2 == 0 else reversed(engines):
                forget()
                fakes.restore()
                results[engine] = run(ENGINES[engine], program)
                _save(found["cold"], engine, results[engine])
    if "again" in modes:
        for turn in range(repeat + 1):
            for engine in engines:
                lowered = results[engine] = run(ENGINES[engine], program)
                if turn:
                    _save(found["again"], engine, lowered)
    if BASE not in results:
        results[BASE] = run(ENGINES[BASE], program)
    differences = {e: compare(one, results[BASE], built) for e, one in results.items() if e != BASE}
    return found, differences


def measure_fresh(name: str, engines: Sequence[str], repeat: int) -> Seconds:
    """Measure a fresh process for each engine, in turns."""
    seconds: Seconds = {}
    for _ in range(repeat):
        for engine in engines:
            command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "lowering_child.py"), engine, name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            _save(seconds, engine, json.loads(done.stdout.splitlines()[-1]))
    return seconds


def summarise(seconds: Seconds) -> dict[str, Any]:
    """Return for each engine its best run by step, and how many times faster it is than ExecuTorch."""
    best = {engine: min(runs, key=lambda one: one["total"]) for engine, runs in seconds.items()}
    ratios = {engine: best[BASE]["total"] / one["total"] for engine, one in best.items() if engine != BASE}
    steps = {
        engine: {step: best[BASE][step] / one[step] for step in STEPS if step in one}
        for engine, one in best.items()
        if engine != BASE
    }
    return {"seconds": best, "faster": ratios, "faster_by_step": steps}


def overall(rows: dict[str, dict[str, Any]], engine: str) -> tuple[float, float, str]:
    """Return the geometric mean of an engine's ratios, the least one and its model."""
    ratios = {name: row["faster"][engine] for name, row in rows.items()}
    worst = min(ratios, key=lambda name: ratios[name])
    return math.exp(sum(map(math.log, ratios.values())) / len(ratios)), ratios[worst], worst


def show(console: Console, mode: str, rows: dict[str, dict[str, Any]], differences: dict[str, dict[str, Any]]) -> None:
    """Print the table of a mode."""
    others = [engine for engine in next(iter(rows.values()))["seconds"] if engine != BASE]
    parts = ("imports", "lowering") if mode == "fresh" else STEPS
    table = Table(title=f"{mode}: CPU seconds ({' + '.join(parts)}) and times faster than ExecuTorch")
    for column in ("model", BASE, *(c for engine in others for c in (engine, "faster")), "same result"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, row in rows.items():
        cells = []
        for engine in (BASE, *others):
            one = row["seconds"][engine]
            cells.append(f"{one['total']:.2f} ({' + '.join(f'{one.get(part, 0.0):.2f}' for part in parts)})")
            if engine != BASE:
                cells.append(f"{row['faster'][engine]:.2f}x")
        wrong = [f"{engine}: {', '.join(found)}" for engine, found in differences.get(name, {}).items() if found]
        table.add_row(name, *cells, "; ".join(wrong) or ("yes" if name in differences else ""))
    console.print(table)
    for engine in others:
        mean, least, worst = overall(rows, engine)
        console.print(f"{mode}, {engine}: geometric mean {mean:.2f}x, least {least:.2f}x ({worst})")
    for small, large in GROWTH:
        if small in rows and large in rows:
            grown = {
                e: rows[large]["seconds"][e]["total"] / rows[small]["seconds"][e]["total"] for e in (BASE, *others)
            }
            console.print(f"{mode}, {large} / {small}: " + ", ".join(f"{e} {one:.2f}" for e, one in grown.items()))


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="issue", help=f"issue, others, all, or names: {', '.join(MODELS)}")
    parser.add_argument("--modes", default="cold", help=f"of {', '.join(MODES)}")
    parser.add_argument("--engines", default="ours", help="beside ExecuTorch: ours, plain (without what makes it fast)")
    parser.add_argument("--repeat", type=int, default=3, help="runs per engine; the best one counts")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    sets = {"issue": [*ISSUE], "others": [*OTHERS], "all": [*MODELS]}
    arguments.models = sets.get(arguments.models) or arguments.models.split(",")
    arguments.modes = arguments.modes.split(",")
    arguments.engines = [BASE, *arguments.engines.split(",")]
    for got, known in ((arguments.models, MODELS), (arguments.modes, MODES), (arguments.engines, ENGINES)):
        if unknown := sorted(set(got) - set(known)):
            parser.error(f"{unknown} are not known; expected some of {sorted(known)}")
    return arguments


def main() -> int:
    """Run the benchmark; return 1 if an engine's result is not ExecuTorch's."""
    arguments = _read_arguments()
    rows: dict[str, dict[str, Any]] = {mode: {} for mode in arguments.modes}
    differences: dict[str, dict[str, list[str]]] = {}
    small = export(_Small().eval(), (torch.randn(1, 3, 8, 8),))
    here = [mode for mode in arguments.modes if mode != "fresh"]
    for engine in arguments.engines if here else ():
        run(ENGINES[engine], small)
    for name in arguments.models:
        if here:
            seconds, differences[name] = measure_here(name, arguments.engines, here, arguments.repeat)
            for mode in here:
                rows[mode][name] = summarise(seconds[mode])
        if "fresh" in arguments.modes:
            rows["fresh"][name] = summarise(measure_fresh(name, arguments.engines, arguments.repeat))
        ratios = {mode: {e: round(r, 2) for e, r in rows[mode][name]["faster"].items()} for mode in rows}
        print(f"{name}: {ratios} {differences.get(name, '')}", file=sys.stderr, flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps({"modes": rows, "differences": differences}, indent=2))
    console = Console(width=None if sys.stdout.isatty() else 200)
    for mode in arguments.modes:
        show(console, mode, rows[mode], differences)
    return int(any(found for one in differences.values() for found in one.values()))


if __name__ == "__main__":
    sys.exit(main())
