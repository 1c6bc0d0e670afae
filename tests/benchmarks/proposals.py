"""Proposing partitions: this package's algorithm beside torch.fx's, in one run; and what it takes alone."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from random_dags import chain, label
from rich.console import Console
from rich.table import Table
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import create_op_support

from exir_lowering.partitioners import propose_partitions

COMPARED = ((500, 2), (1000, 2), (2000, 2), (1000, 100), (4000, 100))
"""Nodes, and how far apart the unsupported ones are."""

ALONE = (1000, 2000, 4000, 8000, 16000, 32000, 64000)


def is_supported(node: Node) -> bool:
    """Tell whether the backend of the benchmark takes a node."""
    return label(node) == "A"


def ours(module: GraphModule) -> int:
    """Return the number of partitions that this package proposes."""
    return len(propose_partitions(module, is_supported))


def theirs(module: GraphModule) -> int:
    """Return the number of partitions that torch.fx proposes."""
    support = create_op_support(lambda modules, node: is_supported(node))
    return len(CapabilityBasedPartitioner(module, support, allows_single_node_partition=True).propose_partitions())


def seconds(run: Callable[[], Any], times: int) -> tuple[float, Any]:
    """Return the least CPU time of several runs, with the collector kept off what torch has loaded."""
    best, result = float("inf"), None
    for _ in range(times):
        gc.collect()
        gc.freeze()
        start = time.process_time()
        result = run()
        best = min(best, time.process_time() - start)
        gc.unfreeze()
    return best, result


def compare(quick: bool) -> list[dict[str, Any]]:
    """Time both on chains of which some nodes are unsupported."""
    rows = []
    for nodes, every in COMPARED:
        if quick and nodes > 1000:
            continue
        module = chain(nodes, every)
        own, found = seconds(lambda module=module: ours(module), 5)
        other, expected = seconds(lambda module=module: theirs(module), 1)
        rows.append(
            {
                "nodes": nodes,
                "unsupported": 1 / every,
                "partitions": found,
                "upstream_partitions": expected,
                "ours_s": own,
                "upstream_s": other,
                "speedup": other / own,
            }
        )
        print(f"{nodes} nodes, every {every}th unsupported: done", file=sys.stderr)
    return rows


def growth() -> list[dict[str, Any]]:
    """Time this package's algorithm alone as the graph doubles, for both kinds of chain."""
    rows: list[dict[str, Any]] = []
    for every in (2, 100):
        for nodes in ALONE:
            module = chain(nodes, every)
            own, _ = seconds(lambda module=module: ours(module), 7)
            row: dict[str, Any] = {"nodes": nodes, "unsupported": 1 / every, "ours_s": own}
            if nodes != ALONE[0]:
                row["growth"] = own / rows[-1]["ours_s"]
            rows.append(row)
    return rows


def memory() -> dict[str, float]:
    """Measure the extra peak memory for 40,000 nodes of which 400 are unsupported, in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "memory"], capture_output=True, text=True, check=True)
    megabytes, taken = map(float, done.stdout.split()[-2:])
    return {"nodes": 40_000, "unsupported": 400, "extra_mb": megabytes, "ours_s": taken}


def _measure_memory() -> None:
    from exir_lowering.graphs import schedule  # imported before the measurement starts

    del schedule
    module = chain(40_000, 100)
    ours(chain(100, 2))
    gc.collect()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    start = time.process_time()
    ours(module)
    taken = time.process_time() - start
    print((_resident("VmHWM") - before) / 1e3, taken)


def _resident(key: str) -> int:
    """Return a line of this process's memory figures in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def show(console: Console, compared: list[dict[str, Any]], alone: list[dict[str, Any]], used: dict[str, float]) -> None:
    """Print the tables."""
    table = Table(title="Proposing partitions of a chain: CapabilityBasedPartitioner and exir-lowering")
    for column in ("nodes", "unsupported", "torch.fx CPU s", "ours CPU s", "faster", "partitions (torch.fx, ours)"):
        table.add_column(column, justify="right")
    for row in compared:
        table.add_row(
            str(row["nodes"]),
            f"{row['unsupported']:.0%}",
            f"{row['upstream_s']:.2f}",
            f"{row['ours_s']:.4f}",
            f"{row['speedup']:.0f}x",
            f"{row['upstream_partitions']}, {row['partitions']}",
        )
    console.print(table)
    table = Table(title="Growth of ours alone")
    for column in ("nodes", "unsupported", "CPU s", "time(2N)/time(N)"):
        table.add_column(column, justify="right")
    for row in alone:
        grown = f"{row['growth']:.2f}" if "growth" in row else ""
        table.add_row(str(row["nodes"]), f"{row['unsupported']:.0%}", f"{row['ours_s']:.4f}", grown)
    console.print(table)
    console.print(
        f"{used['nodes']} nodes, {used['unsupported']} unsupported: {used['extra_mb']:.1f} MB of extra memory at the "
        f"peak, {used['ours_s']:.2f} s of CPU time"
    )


if __name__ == "__main__":
    _measure_memory()
