"""How fast the files run: `python tests/benchmarks/latency.py`.

ExecuTorch's own file, ours without and with rewrites, OpenVINO's where it is installed, PyTorch, and torch.compile,
which needs a C++ compiler. All engines run in turns in one process, on as many pinned cores as `--cores` says:
    1   ratios are of CPU time, which other work on the machine hardly changes
    2   ratios are of wall time: the machine has to be quiet
The outputs are compared with PyTorch's; the exit status is 1 if a file's are wrong, or if rewrites made an error grow.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
# OpenVINO and oneDNN compute with bfloat16 where a CPU has it, unless this is set before they are loaded.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")

import torch
from latency_engines import ENGINES, OURS, Run, Subject, build, describe_file, make_files, open_all, use_cores
from latency_models import CONVOLUTIONAL, MODELS, OTHERS, TRANSFORMERS
from rich.console import Console
from rich.table import Table

BASE = "executorch"
DEFAULT = (BASE, *OURS, "eager")
TOLERANCE = {"float": 1e-4, "int8": 0.5}
"""The error that an output may have, as a share of the largest output. With random weights, a last place of an early
activation becomes many in int8."""

ROUNDING = 4 * torch.finfo(torch.float32).eps
"""By how much an error may grow, as a share of the largest output: another order of sums changes the last places."""

NOISE = 1.2
"""By how much a quantised model's root of the mean square of errors may grow: its largest error is one of chance."""

Row = dict[str, Any]


def measure(subject: Subject, engines: tuple[str, ...], cores: Sequence[int], rounds: int, keep: Path | None) -> Row:
    """Measure a model.

    Args:
        subject: The model.
        engines: The engines.
        cores: The modes: how many cores may be used.
        rounds: How often each engine runs in each mode.
        keep: A folder for ExecuTorch's files.

    Returns:
        Milliseconds by mode and engine, what the files are, errors, and what failed.
    """
    expected = subject.expected()
    largest = max(float(one.abs().max()) for one in expected)
    files, failures = make_files(subject, engines, keep)
    about = {engine: describe_file(file) for engine, file in files.items()}
    row: Row = {"largest": largest, "files": about, "failures": failures, "ms": {}}
    row["int8"] = subject.built.quantize is not None
    row["tolerance"] = largest * TOLERANCE["int8" if row["int8"] else "float"]
    for count in cores:
        use_cores(count)
        runs, ready, failed = open_all(subject, files, engines)
        failures.update(failed)
        for engine, run in runs.items():
            found = about.setdefault(engine, {})
            for kind, error in _errors(run(), expected).items():
                found[kind] = max(found.get(kind, 0.0), error)
        for engine, seconds in ready.items():
            about[engine].setdefault("ready_ms", seconds * 1e3)
        row["ms"][str(count)] = time_in_turns(runs, rounds)
        runs.clear()
    return row


def _errors(outputs: Sequence[Any], expected: Sequence[torch.Tensor]) -> dict[str, float]:
    """Return the largest absolute error, and the root of the mean square of all."""
    pairs = list(zip(outputs, expected, strict=True))
    if any(got.shape != right.shape for got, right in pairs):
        return {"error": math.inf, "rms": math.inf}
    errors = torch.cat([(got.double() - right.double()).abs().flatten() for got, right in pairs])
    errors = errors.nan_to_num(nan=math.inf)
    return {"error": float(errors.max()), "rms": float(errors.square().mean().sqrt())}


def time_in_turns(runs: Mapping[str, Run], rounds: int) -> dict[str, dict[str, float]]:
    """Run all engines in turns, after one run that does not count; no engine always follows the same one."""
    taken: dict[str, list[tuple[float, float]]] = {engine: [] for engine in runs}
    for turn in range(rounds + 1):
        start = turn // 2 % len(runs)
        order = [*runs][start:] + [*runs][:start]
        for engine in order if turn % 2 == 0 else reversed(order):
            cpu, wall = time.process_time(), time.perf_counter()
            runs[engine]()
            taken[engine].append((time.process_time() - cpu, time.perf_counter() - wall))
    found = {}
    for engine, all_runs in taken.items():
        cpus, walls = ([one * 1e3 for one in column] for column in zip(*all_runs[1:], strict=True))
        found[engine] = {
            "cpu_min": min(cpus),
            "cpu_median": statistics.median(cpus),
            "wall_min": min(walls),
            "wall_median": statistics.median(walls),
        }
    return found


def find_faults(row: Row) -> list[str]:
    """Return what is wrong with a model's results."""
    about, faults = row["files"], []
    for engine, one in about.items():
        # OpenVINO quantises differently; it and torch.compile are shown, not judged.
        if engine in (BASE, *OURS) and one.get("error", 0.0) > row["tolerance"]:
            faults.append(f"{engine}: error {one['error']:.1e}, at most {row['tolerance']:.1e} expected")
    before, after = about.get("none", {}), about.get("safe", {})
    if "error" in before and "error" in after:
        if row["int8"]:
            grew = after["rms"] > before["rms"] * NOISE
        else:
            grew = after["error"] > before["error"] + row["largest"] * ROUNDING
        if grew:
            faults.append(f"safe: error {after['error']:.1e}, without rewrites {before['error']:.1e}")
    faults += [f"{engine}: {why}" for engine, why in row["failures"].items() if engine in (BASE, *OURS)]
    return faults


def latency(row: Row, mode: str, engine: str) -> float | None:
    """Return an engine's milliseconds: CPU time on one core, wall time on several."""
    found = row["ms"][mode].get(engine)
    return found["cpu_min" if mode == "1" else "wall_min"] if found else None


def ratio(row: Row, mode: str, engine: str, base: str = BASE) -> float | None:
    """Return how many times faster an engine is than another one."""
    one, other = latency(row, mode, engine), latency(row, mode, base)
    return other / one if one and other else None


def report(rows: Mapping[str, Row], engines: Sequence[str]) -> None:
    """Print for each mode a table and what it says, and what is not available or wrong."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    for mode in next(iter(rows.values()))["ms"]:
        kind = "CPU" if mode == "1" else "wall"
        table = Table(title=f"{mode} cores: {kind} milliseconds, least of all rounds (times faster than {BASE})")
        for column in ("model", *engines, "delegates", "MB planned"):
            table.add_column(column, justify="left" if column == "model" else "right")
        for name, row in rows.items():
            cells = []
            for engine in engines:
                found, faster = latency(row, mode, engine), ratio(row, mode, engine)
                times = f" ({faster:.2f}x)" if faster and engine != BASE else ""
                cells.append(f"{found:.2f}{times}" if found else "-")
            for key, scale in (("delegates", 1), ("planned", 1e-6)):
                described = (row["files"].get(engine, {}) for engine in engines)
                cells.append(" / ".join(f"{one[key] * scale:.3g}" for one in described if key in one))
            table.add_row(name, *cells)
        console.print(table)
        for engine in engines:
            ratios = {name: found for name, row in rows.items() if (found := ratio(row, mode, engine))}
            for title, group in (("transformers", TRANSFORMERS), ("convolutional", CONVOLUTIONAL), ("others", OTHERS)):
                if engine != BASE and (inside := [found for name, found in ratios.items() if name in group]):
                    print(f"{engine}: {title} {statistics.geometric_mean(inside):.2f}x, least {min(inside):.2f}x")
    for name, row in rows.items():
        for engine, why in row["failures"].items():
            print(f"{name}: {engine} is not available: {why}")
        for fault in find_faults(row):
            print(f"{name}: WRONG: {fault}")


def _read_arguments() -> argparse.Namespace:
    sets = {"transformers": TRANSFORMERS, "convolutional": CONVOLUTIONAL, "others": OTHERS, "all": MODELS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="all", help=f"{', '.join(sets)}, or names: {', '.join(MODELS)}")
    parser.add_argument("--engines", default=",".join(DEFAULT), help=f"of {', '.join(ENGINES)}; or all")
    parser.add_argument("--rounds", type=int, default=10, help="runs per engine; the fastest one counts")
    parser.add_argument("--cores", default="1", help="1, 2, or 1,2")
    parser.add_argument("--keep", type=Path, help="a folder for ExecuTorch's files, which take long to make")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    arguments.models = [*sets.get(arguments.models, ())] or arguments.models.split(",")
    arguments.engines = ENGINES if arguments.engines == "all" else tuple(arguments.engines.split(","))
    arguments.cores = [int(count) for count in arguments.cores.split(",")]
    for got, known in ((arguments.models, MODELS), (arguments.engines, ENGINES)):
        if unknown := sorted(set(got) - set(known)):
            parser.error(f"{unknown} are not known; expected some of {sorted(known)}")
    if max(arguments.cores) > (os.cpu_count() or 1):
        parser.error(f"--cores {max(arguments.cores)}: this machine has {os.cpu_count()}")
    return arguments


def main() -> int:
    """Run the benchmark; return 1 if a result is wrong or an error grew."""
    arguments = _read_arguments()
    warnings.simplefilter("ignore")
    figures = {"engines": arguments.engines, "models": {}}
    for name in arguments.models:
        subject = build(name)
        row = measure(subject, arguments.engines, arguments.cores, arguments.rounds, arguments.keep)
        figures["models"][name] = row
        del subject
        ratios = {m: {e: round(ratio(row, m, e) or 0, 2) for e in row["ms"][m]} for m in row["ms"]}
        print(f"{name}: {ratios} {find_faults(row) or ''}", file=sys.stderr, flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=2))
    report(figures["models"], arguments.engines)
    return int(any(find_faults(row) for row in figures["models"].values()))


if __name__ == "__main__":
    sys.exit(main())
