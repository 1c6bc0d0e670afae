"""What a call of a Python delegate costs, beside XNNPACK's: `python tests/benchmarks/delegates.py`.

Each program adds two small tensors over and over, every addition in a delegate of its own. The slope between a long and
a short program is the cost of one call; what a run costs by itself is not in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import torch
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from executorch.exir import to_edge
from lowering_support import NoopBackend, TagPartitioner
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.export import export

from exir_lowering import Delegate, LoadedProgram, load, to_backend

SHORT, LONG = 4, 24
BACKENDS = {"portable kernel": None, "XNNPACK": XnnpackBackend.__name__, "Python, no-op": "noop"}


class NoopDelegate(Delegate):
    """Returns its first input, which is copied into the output."""

    delegate_id = "noop"

    def execute(self, handle: Any, inputs: list[Any]) -> Sequence[Any]:
        """Return the input."""
        return inputs[:1]


class _Sums(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            x = x + y
        return x


def program(count: int, backend: str | None) -> LoadedProgram:
    """Return a program of that many delegates; of portable kernels for None."""
    edge = to_edge(export(_Sums(count), (torch.ones(4), torch.ones(4)))).exported_program()
    partitioner = TagPartitioner(lambda node: node.name, backend) if backend is not None else []
    return load(to_backend(edge, partitioner, backends={"noop": NoopBackend()}).emit().buffer, delegates=[NoopDelegate])


def measure(runs: int, repeat: int) -> list[dict[str, Any]]:
    """Return a row for each kind of call, in microseconds."""
    inputs = torch.ones(4), torch.ones(4)
    programs = {name: {count: program(count, backend) for count in (SHORT, LONG)} for name, backend in BACKENDS.items()}
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(repeat):  # in turns, so that what else the machine does meets all of them
        for name, pair in programs.items():
            for count, loaded in pair.items():
                start = time.perf_counter()
                for _ in range(runs):
                    loaded.run("forward", *inputs)
                found.setdefault((name, count), []).append((time.perf_counter() - start) / runs * 1e6)
    rows = []
    for name in programs:
        low, high = (found[name, count] for count in (SHORT, LONG))
        slopes = [(b - a) / (LONG - SHORT) for a, b in zip(low, high, strict=True)]
        rows.append(
            {
                "call": name,
                "best_us": (min(high) - min(low)) / (LONG - SHORT),
                "median_us": statistics.median(slopes),
                "run_us": min(low),
            }
        )
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    arguments = parser.parse_args()
    rows = measure(*((200, 5) if arguments.quick else (2000, 9)))
    table = Table(title="One call of a delegate, 4 floats")
    for column in ("call", "best us", "median us", f"whole run with {SHORT} calls, us"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row["call"], *(f"{row[key]:.1f}" for key in ("best_us", "median_us", "run_us")))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    by_name = {row["call"]: row["best_us"] for row in rows}
    print(f"no-op Python delegate / XNNPACK: {by_name['Python, no-op'] / by_name['XNNPACK']:.1f}x")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
