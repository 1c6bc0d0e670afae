"""The planned memory of methods before and after: `planned_memory.py [MODEL...]`, as a table in Markdown.

"other places" is our plan of the calls in their given order. The last column has greedy's emission and ours.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.export import export

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import models
import wide_models

from exir_lowering import lower
from exir_lowering.partitioners import SupportPartitioner, ops
from exir_lowering.steps import memory_planning

PRODUCTS = ("aten.convolution.default", "aten.addmm.default", "aten.mm.default", "aten.bmm.default")
WIDE = {
    "mixture of experts": wide_models.Experts,
    "detector with a feature pyramid": wide_models.Detector,
    "dense block": wide_models.Dense,
    "U-Net": wide_models.UNet,
    "Inception block": wide_models.Inception,
    "decoder layer with a cache": wide_models.Decoder,
    "bidirectional LSTM": wide_models.Recurrent,
}
PARTITIONERS: dict[str, Any] = {
    "host": None,
    "xnnpack": "xnnpack",
    "products": SupportPartitioner({"reference": ops(*PRODUCTS)}),  # many delegates, with the rest between them
}


def _model(name: str) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    return wide_models.build(WIDE[name]) if name in WIDE else models.build(name)


def _planned(lowered: Any, planner: str) -> tuple[int, float]:
    start = time.perf_counter()
    artifact = replace(lowered, memory_planner=planner).emit()
    return artifact.report.methods[0].memory.bytes, time.perf_counter() - start


def main() -> None:
    """Print a row for each model and partitioner."""
    print("| model | delegated to | greedy | other places | and another order | saved | emission, ms |")
    print("|---|---|---:|---:|---:|---:|---:|")
    other = memory_planning.depth_first
    for name in sys.argv[1:] or [*WIDE, *models.MODELS]:
        program = export(*_model(name))
        for label, partitioner in PARTITIONERS.items():
            lowered = lower(program, partitioner)
            greedy, before = _planned(lowered, "greedy")
            memory_planning.depth_first = lambda module: []
            places, _ = _planned(lowered, "smallest")
            memory_planning.depth_first = other
            smallest, after = _planned(lowered, "smallest")
            saved = f"{1 - smallest / greedy:.0%}"
            times = f"{before * 1e3:.0f} / {after * 1e3:.0f}"
            sizes = " | ".join(f"{size:,}" for size in (greedy, places, smallest))
            print(f"| {name} | {label} | {sizes} | {saved} | {times} |", flush=True)


if __name__ == "__main__":
    main()
