"""Plots of figures for the documents: `python tests/benchmarks/plots.py FIGURES.json... docs/images`.

The figures are what `--json` wrote: of `lowering.py`, `latency.py`, `language_model.py` (several) or of all benchmarks.
It needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from lowering_models import GROWTH, ISSUE
from matplotlib import pyplot
from matplotlib.axes import Axes

STEPS = {"edge": "Edge conversion", "backend": "partitions and backend", "emit": "emission"}
COLOURS = {"edge": "#4c72b0", "backend": "#dd8452", "emit": "#55a868"}
ENGINES = {"executorch": "ExecuTorch", "ours": "exir-lowering"}
ENGINE_COLOURS = {"executorch": "#bbbbbb", "ours": "#4c72b0"}
FILES = {"safe": "exir-lowering, with rewrites", "eager": "PyTorch, eager"}
FILE_COLOURS = {"safe": "#4c72b0", "eager": "#bbbbbb"}
FASTEST = 4
"""Where the bars of latency end; the number beside each says what it is."""

STYLE = {
    "svg.hashsalt": "exir-lowering",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
}

Rows = Mapping[str, Mapping[str, Any]]


def plot_steps(rows: Rows) -> Any:
    """Return a figure of the CPU seconds of each step, ExecuTorch's above ours, for each model."""
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(rows) + 1.2), layout="constrained")
    for index, row in enumerate(rows.values()):
        for engine, offset in (("executorch", -0.2), ("ours", 0.2)):
            end = _bar(axes, row["seconds"][engine], index + offset)
        axes.text(end, index + 0.2, f" {row['faster']['ours']:.1f} times faster", va="center", fontsize=8)
    _name_rows(axes, rows, "CPU seconds; above: ExecuTorch, below: exir-lowering")
    _legend(axes, {COLOURS[step]: label for step, label in STEPS.items()})
    return figure


def _bar(axes: Axes, seconds: Mapping[str, float], at: float) -> float:
    left = 0.0
    for step in STEPS:
        axes.barh(at, seconds.get(step, 0.0), left=left, height=0.36, color=COLOURS[step])
        left += seconds.get(step, 0.0)
    return left


def _name_rows(axes: Axes, names: Mapping[str, Any] | Sequence[str], label: str) -> None:
    axes.set_yticks(range(len(names)), list(names))
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel(label)


def _legend(axes: Axes, names: Mapping[str, str], place: str = "lower right") -> None:
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in names]
    axes.legend(handles, list(names.values()), loc=place, frameon=False)


def plot_layers(rows: Rows) -> Any:
    """Return a figure of CPU seconds by the number of layers of a Llama."""
    figure, axes = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
    for engine, label in ENGINES.items():
        seconds = [rows[name]["seconds"][engine]["total"] for name in GROWTH[0]]
        _line(axes, (4, 16), seconds, engine, label)
    axes.set_xlabel("layers of a Llama")
    axes.set_ylabel("CPU seconds")
    axes.set_xticks((4, 16))
    axes.set_ylim(bottom=0)
    return figure


def plot_partitions(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a figure of CPU seconds by the number of partitions of a chain."""
    figure, axes = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
    for engine, key in (("executorch", "upstream_s"), ("ours", "ours_s")):
        found = [(row["partitions"], row[key]) for row in rows if key in row]
        _line(axes, *zip(*found, strict=True), engine, ENGINES[engine])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks([row["partitions"] for row in rows])
    axes.set_xlabel("partitions, no-op backend")
    axes.set_ylabel("CPU seconds")
    return figure


def _line(axes: Axes, across: Sequence[float], up: Sequence[float], engine: str, label: str) -> None:
    axes.plot(across, up, marker="o", color=ENGINE_COLOURS[engine])
    axes.annotate(label, (across[-1], up[-1]), xytext=(-6, 6), textcoords="offset points", ha="right")


def plot_latency(rows: Rows) -> Any:
    """Return a figure of how many times faster than ExecuTorch's file ours and PyTorch are, on one core."""
    figure, axes = pyplot.subplots(figsize=(8, 0.42 * len(rows) + 1.2), layout="constrained")
    for place, engine in enumerate(FILES):
        for index, row in enumerate(rows.values()):
            times = row["ms"]["1"]
            if engine in times and "executorch" in times:
                ratio = times["executorch"]["cpu_min"] / times[engine]["cpu_min"]
                at = index + 0.2 * (2 * place - 1)
                axes.barh(at, ratio - 1, left=1, height=0.36, color=FILE_COLOURS[engine])
                if engine == "safe":
                    axes.text(min(max(ratio, 1), FASTEST), at, f" {ratio:.2f}", va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlim(right=FASTEST)
    axes.xaxis.set_major_formatter("{x:g}")
    _name_rows(axes, rows, "times faster than ExecuTorch's file, one core")
    _legend(axes, {FILE_COLOURS[engine]: label for engine, label in FILES.items()}, "upper left")
    return figure


def plot_memory(rows: Mapping[str, Mapping[str, float]]) -> Any:
    """Return a figure of the peak memory of both engines, as a multiple of the weights."""
    figure, axes = pyplot.subplots(figsize=(8, 0.6 * len(rows) + 1.2), layout="constrained")
    for place, engine in enumerate(ENGINES):
        for index, row in enumerate(rows.values()):
            at = index + 0.2 * (2 * place - 1)
            axes.barh(at, row[engine], height=0.36, color=ENGINE_COLOURS[engine])
            axes.text(row[engine], at, f" {row[engine]:.2f}", va="center", fontsize=8)
    _name_rows(axes, rows, "peak memory above the programs, as a multiple of the weights")
    _legend(axes, {ENGINE_COLOURS[engine]: label for engine, label in ENGINES.items()}, "upper right")
    return figure


def list_memory(files: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield what the memory of both engines was measured on, and it as a multiple of the weights."""
    for figures in files:
        if "rows" in figures:
            by_engine = {row["engine"]: row["peak"] / row["weights"] for row in figures["rows"]}
            kind = {"--external": ", weights in a file of their own", "--tied": ", tied embedding"}
            options = "".join(kind[option] for option in figures["options"])
            yield f"Llama, {figures['rows'][0]['weights'] / 1e9:.1f} GB{options}", by_engine
        if "memory" in figures:
            row = figures["memory"]
            shares = {"executorch": row["upstream_share"], "ours": row["ours_share"]}
            yield f"one weight of {row['weight_mb']} MB in {row['methods']} methods", shares


def plot(files: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the name of each plot that the figures are enough for, and the plot."""
    for figures in files:
        if cold := figures.get("modes", {}).get("cold"):
            yield "lowering.svg", plot_steps({name: cold[name] for name in ISSUE if name in cold})
            if all(name in cold for name in GROWTH[0]):
                yield "layers.svg", plot_layers(cold)
        if "models" in figures:
            yield "latency.svg", plot_latency(figures["models"])
        if "chains" in figures:
            yield "partitions.svg", plot_partitions(figures["chains"])
    if memory := dict(list_memory(files)):
        yield "memory.svg", plot_memory(memory)


def main() -> int:
    """Write the plots of files of figures into a folder."""
    *sources, folder = map(Path, sys.argv[1:])
    matplotlib.rcParams.update(STYLE)
    for name, figure in plot([json.loads(source.read_text()) for source in sources]):
        figure.savefig(folder / name, metadata={"Date": None})
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
