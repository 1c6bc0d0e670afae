"""Many small layers with XNNPACK, from `torch.export` output to the file, beside ExecuTorch's own engine."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from rich.console import Console
from rich.table import Table
from torch.export import export

import exir_lowering


class Layers(torch.nn.Module):
    """Linear layers, each with two parameters."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(parameters // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def compare(quick: bool) -> list[dict[str, Any]]:
    """Lower and emit models with 500 to 2,000 parameters in both engines, once each: it takes minutes."""
    rows = []
    for parameters in (100, 200) if quick else (500, 1000, 2000):
        program = export(Layers(parameters).eval(), (torch.rand(1, 8),))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs, lower = _timed(
                lambda program=program: to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
            )
            _, emit = _timed(theirs.to_executorch)
            lowered, own_lower = _timed(lambda program=program: exir_lowering.lower(program, "xnnpack"))
            _, own_emit = _timed(lowered.emit)
        rows.append(
            {
                "parameters": parameters,
                "upstream_lower_s": lower,
                "upstream_emit_s": emit,
                "ours_lower_s": own_lower,
                "ours_emit_s": own_emit,
                "ratio": (own_lower + own_emit) / (lower + emit),
                "shares": _shares(lowered.report.seconds),
            }
        )
    return rows


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Return a result and its CPU time in seconds."""
    gc.collect()
    start = time.process_time()
    result = run()
    return result, time.process_time() - start


def _shares(seconds: Any) -> dict[str, float]:
    total = sum(seconds.values())
    return {step: value / total for step, value in seconds.items()}


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title="Linear layers of 8 x 8 with XNNPACK, CPU seconds: lower + emit")
    for column in ("parameters", "upstream", "ours", "ratio", "where ours goes"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['parameters']:,}",
            f"{row['upstream_lower_s']:.1f} + {row['upstream_emit_s']:.1f}",
            f"{row['ours_lower_s']:.1f} + {row['ours_emit_s']:.1f}",
            f"{row['ratio']:.2f}",
            "  ".join(f"{step} {share:.1%}" for step, share in row["shares"].items()),
        )
    console.print(table)
