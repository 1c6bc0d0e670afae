"""Measured costs at work: run time with what CostPartitioner chooses, and with everything delegated: `costs.py`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from interleaving import interleaved
from models import build
from torch.export import export

from exir_lowering import LoweredMethods, load, lower
from exir_lowering.partitioners.by_cost import CostPartitioner
from exir_lowering.partitioners.cost.measure import measure_costs


class Interleaved(torch.nn.Module):
    """Operators that XNNPACK takes, on small tensors, between operators that only the host takes."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = blocks
        self.conv = torch.nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv(x)).mean((2, 3))
        for _ in range(self.blocks):
            x = torch.cumsum(torch.relu(x + x), 1)
        return x


def partitions(lowered: LoweredMethods) -> int:
    """Return how many partitions there are."""
    return sum(len(method.partitions) for method in lowered.report.methods)


def left(lowered: LoweredMethods) -> int:
    """Return how many operators stay on the host because of what they cost."""
    return sum(reason.code == "cost" for method in lowered.report.methods for h in method.host for reason in h.reasons)


def compare(name: str, module: torch.nn.Module, inputs: tuple[Any, ...], rounds: int = 200) -> None:
    """Print the run time as chosen and with everything delegated, and their ratio."""
    program = export(module.eval(), inputs)
    start = time.perf_counter()
    table = measure_costs(program, XnnpackPartitioner())
    measuring = time.perf_counter() - start
    partitioner = CostPartitioner.from_partitioner(table, XnnpackPartitioner())
    ways = [lower(program, way) for way in (partitioner, XnnpackPartitioner(), None)]
    files = [load(way.emit().buffer) for way in ways]
    chosen, everything = interleaved(files[:2], inputs, rounds)
    (host,) = interleaved(files[2:], inputs, rounds // 20)  # on its own: it would leave cold caches to its successor
    print(f"{name}: {len(table.places['host'])} kinds of operators measured in {measuring:.0f} s")
    print(f"  chosen      {chosen * 1e6:9.1f} us in {partitions(ways[0])} partitions")
    print(f"              on the host for their cost: {left(ways[0])} operators")
    print(f"  everything  {everything * 1e6:9.1f} us in {partitions(ways[1])} partitions")
    print(f"  host only   {host * 1e6:9.1f} us")
    print(f"  chosen / everything: {chosen / everything:.3f}", flush=True)


def main() -> None:
    """Run the comparison on two models."""
    torch.manual_seed(0)
    compare("small operators in between", Interleaved(20), (torch.randn(1, 3, 16, 16),))
    compare("mobilenet_v2", *build("mobilenet_v2"))


if __name__ == "__main__":
    main()
