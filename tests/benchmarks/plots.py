"""Plots of figures for the documents: `python tests/benchmarks/plots.py FIGURES.json docs/images`.

The figures are those of `lowering.py` or `latency.py`.

It needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes

STEPS = ("edge", "backend", "emit")
COLOURS = {"edge": "#4c72b0", "backend": "#dd8452", "emit": "#55a868"}
GROWTH = ("llama4_prefill", "llama16_prefill")
ENGINES = {"safe": "exir-lowering, with rewrites", "eager": "PyTorch"}
ENGINE_COLOURS = {"safe": "#4c72b0", "eager": "#bbbbbb"}


def plot_steps(rows: dict[str, dict[str, Any]], title: str) -> Any:
    """Return a figure of the CPU seconds of each step, ExecuTorch's above ours, for each model."""
    figure, axes = pyplot.subplots(figsize=(8, 0.55 * len(rows) + 1.4), layout="constrained")
    labels = []
    for index, (name, row) in enumerate(rows.items()):
        for engine, offset in (("executorch", -0.2), ("ours", 0.2)):
            _bar(axes, row["seconds"][engine], index + offset)
        labels.append(f"{name}  {row['faster']['ours']:.1f}x")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("CPU seconds; ExecuTorch above, exir-lowering below")
    axes.set_title(title)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[step]) for step in STEPS]
    axes.legend(handles, ("Edge conversion", "partitions and backend", "emission"), loc="lower right")
    return figure


def _bar(axes: Axes, seconds: dict[str, float], at: float) -> None:
    left = 0.0
    for step in STEPS:
        axes.barh(at, seconds.get(step, 0.0), left=left, height=0.36, color=COLOURS[step])
        left += seconds.get(step, 0.0)


def plot_growth(rows: dict[str, dict[str, Any]]) -> Any:
    """Return a figure of CPU seconds by the number of layers of a Llama."""
    figure, axes = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
    for engine, label in (("executorch", "ExecuTorch"), ("ours", "exir-lowering")):
        axes.plot((4, 16), [rows[name]["seconds"][engine]["total"] for name in GROWTH], marker="o", label=label)
    axes.set_xlabel("layers")
    axes.set_ylabel("CPU seconds")
    axes.set_xticks((4, 16))
    axes.set_ylim(bottom=0)
    axes.set_title("Llama, 16 tokens, first lowering")
    axes.legend()
    return figure


def plot_latency(rows: dict[str, dict[str, Any]]) -> Any:
    """Return a figure of how many times faster than ExecuTorch's file ours and PyTorch are, on one core."""
    figure, axes = pyplot.subplots(figsize=(8, 0.45 * len(rows) + 1.4), layout="constrained")
    for place, engine in enumerate(ENGINES):
        for index, row in enumerate(rows.values()):
            times = row["ms"]["1"]
            if engine in times and "executorch" in times:
                ratio = times["executorch"]["cpu_min"] / times[engine]["cpu_min"]
                axes.barh(index + 0.2 * (2 * place - 1), ratio, height=0.36, color=ENGINE_COLOURS[engine])
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=ENGINE_COLOURS[engine]) for engine in ENGINES]
    axes.legend(handles, ENGINES.values(), loc="lower right")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("times faster than ExecuTorch's file")
    axes.set_title("Latency on one core")
    return figure


def main() -> int:
    """Write the plots of a file of figures into a folder."""
    source, folder = map(Path, sys.argv[1:3])
    figures = json.loads(source.read_text())
    modes = figures.get("modes", {})
    matplotlib.rcParams.update({"svg.hashsalt": "exir-lowering", "svg.fonttype": "none", "font.family": "sans-serif"})
    plots = {}
    if "cold" in modes:
        plots["lowering.svg"] = plot_steps(modes["cold"], "First lowering of a model, in a warm process")
        if all(name in modes["cold"] for name in GROWTH):
            plots["lowering-growth.svg"] = plot_growth(modes["cold"])
    if "models" in figures:
        plots["latency.svg"] = plot_latency(figures["models"])
    for name, figure in plots.items():
        figure.savefig(folder / name, metadata={"Date": None})
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
