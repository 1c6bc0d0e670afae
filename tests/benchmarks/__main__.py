"""Benchmarks against ExecuTorch's own engine, side by side in one run: `python tests/benchmarks [--json FILE]`.

Shared machines are noisy: read the ratios, not the seconds.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import startup
from chains import EachBlock, chain
from executorch.exir.backend.backend_api import MethodProgramsPartitionerSpec, to_backend
from rich.console import Console
from rich.table import Table

import exir_lowering

UPSTREAM_LIMIT = 400
"""Partitions up to which ExecuTorch is run: 400 take it about a minute."""


def best(run: Callable[[], Any], times: int) -> tuple[float, Any]:
    """Return the least CPU time of several runs in seconds, each after a full garbage collection, and its result.

    CPU time, because other work on the machine does not count there.
    """
    found: tuple[float, Any] = (float("inf"), None)
    for _ in range(times):
        gc.collect()
        start = time.process_time()
        result = run()
        seconds = time.process_time() - start
        if seconds < found[0]:
            found = (seconds, result)
        del result
    return found


def chains(sizes: list[int], repeat: int) -> list[dict[str, Any]]:
    """Lower a chain of T partitions with a no-op backend in both engines."""
    rows: list[dict[str, Any]] = []
    for size in sizes:
        program = chain(size)
        floor, _ = best(lambda program=program: len(copy.deepcopy(program.graph).nodes), repeat)
        ours, steps = best(
            lambda program=program: exir_lowering.to_backend(program, EachBlock()).report.seconds, repeat
        )
        row: dict[str, Any] = {
            "partitions": size,
            "nodes": len(program.graph.nodes),
            "deepcopy_s": floor,
            "ours_s": ours,
        }
        row["times_deepcopy"] = ours / floor
        row["steps_times_deepcopy"] = {name: seconds / floor for name, seconds in steps.items()}
        if rows and rows[-1]["partitions"] * 2 == size:
            row["growth"] = ours / rows[-1]["ours_s"]
        if size <= UPSTREAM_LIMIT:
            spec = MethodProgramsPartitionerSpec({"forward": program}, {"forward": EachBlock()})
            row["upstream_s"], _ = best(lambda spec=spec: len(to_backend(spec)), 1)
            row["speedup"] = row["upstream_s"] / ours
        rows.append(row)
        print(f"chain of {size} partitions done", file=sys.stderr)
    return rows


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title="A chain of T partitions, no-op backend, no proposal algorithm")
    for column in (
        "T",
        "nodes",
        "upstream CPU s",
        "ours CPU s",
        "faster",
        "time(2T)/time(T)",
        "x deepcopy",
        "where (x deepcopy)",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        steps = "  ".join(f"{name} {value:.1f}" for name, value in row["steps_times_deepcopy"].items())
        table.add_row(
            str(row["partitions"]),
            str(row["nodes"]),
            f"{row['upstream_s']:.2f}" if "upstream_s" in row else "",
            f"{row['ours_s']:.3f}",
            f"{row['speedup']:.0f}x" if "speedup" in row else "",
            f"{row['growth']:.2f}" if "growth" in row else "",
            f"{row['times_deepcopy']:.1f}",
            steps,
        )
    console.print(table)


def main() -> None:
    """Run the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    parser.add_argument("--only", choices=("lowering", "startup"), help="one part")
    arguments = parser.parse_args()
    sizes = [50, 100, 200] if arguments.quick else [50, 100, 200, 400, 800, 1600, 3200]
    best(lambda: exir_lowering.to_backend(chain(20), EachBlock()), 2)  # imports and caches of both engines
    best(lambda: to_backend(MethodProgramsPartitionerSpec({"m": chain(5)}, {"m": EachBlock()})), 1)
    figures: dict[str, Any] = {}
    console = Console(width=None if sys.stdout.isatty() else 160)
    if arguments.only in (None, "lowering"):
        rows = figures["chains"] = chains(sizes, repeat=5)
        show(console, rows)
        growths = [row["growth"] for row in rows if "growth" in row]
        print(f"largest time(2T)/time(T): {max(growths):.2f}, median {statistics.median(growths):.2f}")
    if arguments.only in (None, "startup"):
        figures["startup"] = startup.measure(3 if arguments.quick else 5)
        startup.show(console, figures["startup"])
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
