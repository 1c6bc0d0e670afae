"""What it costs to start: `python tests/benchmarks/startup.py`.

CPU time, user and system, of a fresh process that imports, loads a file and runs it, or does something else with a
small model, beside `import torch` alone and beside ExecuTorch's own runtime and compiler. The processes take turns, so
that whatever else the machine does meets all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.export import export

import exir_lowering


def _command(arguments: str) -> str:
    return f"from exir_lowering.cli import main; assert main([{arguments}]) == 0"


SCRIPTS = {
    "import torch": "import torch",
    "import exir_lowering": "import exir_lowering",
    "load and run": "import torch, exir_lowering; exir_lowering.load({path!r}).run('forward', torch.ones(4, 8))",
    "exir-lower run": _command("'run', {path!r}"),
    "exir-lower inspect": _command("'inspect', {path!r}"),
    "exir-lower verify": _command("'verify', {path!r}, {program!r}"),
    "exir-lower lower": _command("'lower', {program!r}, '-p', 'xnnpack', '--no-cache', '-o', {path!r}"),
    "executorch.runtime": (
        "import torch; from executorch.runtime import Runtime; "
        "Runtime.get().load_program({path!r}).load_method('forward').execute([torch.ones(4, 8)])"
    ),
    "executorch.exir": (
        "import torch; from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner; "
        "from executorch.exir import to_edge_transform_and_lower; program = torch.export.load({program!r}); "
        "lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch(); "
        "lowered.save({path!r})"
    ),
}
FLOOR = "import torch"


class Model(nn.Module):
    """Has work for XNNPACK and for portable kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a value of both."""
        return self.linear(x).sin() + x


def measure(times: int) -> list[dict[str, Any]]:
    """Return a row for each script: least and median CPU seconds, and the median of its ratios to `import torch`.

    Args:
        times: How often each script is run.
    """
    seconds: dict[str, list[float]] = {name: [] for name in SCRIPTS}
    with tempfile.TemporaryDirectory() as folder:
        program = export(Model(), (torch.ones(4, 8),))
        torch.export.save(program, Path(folder, "model.pt2"))
        path = str(exir_lowering.lower(program, "xnnpack").emit().save(Path(folder, "model.pte")))
        for turn in range(times + 1):
            for name, script in SCRIPTS.items():
                spent = _cpu_seconds(script.format(path=path, program=path.replace(".pte", ".pt2")))
                if turn:  # the first one may compile, and fills the caches of the disk
                    seconds[name].append(spent)
    return [
        {
            "script": name,
            "least_s": min(found),
            "median_s": statistics.median(found),
            "ratio": statistics.median(one / floor for one, floor in zip(found, seconds[FLOOR], strict=True)),
        }
        for name, found in seconds.items()
    ]


def _cpu_seconds(script: str) -> float:
    before = os.times()
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title="CPU time of a process, a file with XNNPACK and portable kernels")
    for column in ("process", "least s", "median s", "x import torch"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for row in rows:
        table.add_row(row["script"], f"{row['least_s']:.2f}", f"{row['median_s']:.2f}", f"{row['ratio']:.2f}")
    console.print(table)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--times", type=int, default=5, help="how often each process is run")
    arguments = parser.parse_args()
    rows = measure(arguments.times)
    show(Console(), rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"startup": rows}, indent=2))


if __name__ == "__main__":
    main()
