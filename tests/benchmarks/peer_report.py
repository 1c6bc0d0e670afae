"""What the comparisons print: figures of the engines, how many times ours they are, errors, and parts of a call."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from peer_models import TRANSFORMERS
from rich.console import Console
from rich.table import Table

TOLERANCE = 1e-3
"""The error that an output may have, as a share of the largest value."""

_CONSOLE = Console(width=None if sys.stdout.isatty() else 200)


def find_faults(row: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a model's outputs, and why ExecuTorch's file or ours is not there."""
    wrong = [f"{engine}: error {error:.1e}" for engine, error in row["errors"].items() if not error < TOLERANCE]
    return wrong + [f"{one}: {row['failures'][one]}" for one in ("executorch", "ours") if one in row["failures"]]


def print_figures(title: str, rows: Mapping[str, Mapping[str, Any]], engines: Sequence[str]) -> None:
    """Print the tables, and what is not available or wrong."""
    others = [engine for engine in engines if engine != "ours"]
    table = _table(f"{title}, and how many times ours", ("model", *engines, *(f"{one} / ours" for one in others)))
    wrong = _table("Largest error beside PyTorch in float64, as a share of the largest output", ("model", *engines))
    ratios: dict[str, dict[str, float]] = {one: {} for one in others}
    for name, row in rows.items():
        figures, errors = row["figures"], row["errors"]
        for one in others:
            if one in figures and "ours" in figures:
                ratios[one][name] = figures[one] / figures["ours"]
        cells = [f"{figures[one]:,.1f}" if one in figures else "-" for one in engines]
        cells += [f"{ratios[one][name]:.3f}" if name in ratios[one] else "-" for one in others]
        table.add_row(name, *cells)
        wrong.add_row(name, *(f"{errors[one]:.1e}" if one in errors else "-" for one in engines))
    _CONSOLE.print(table, wrong)
    for one, found in ratios.items():
        for group, names in (("transformers", found.keys() & TRANSFORMERS.keys()), ("all", found.keys())):
            if inside := [found[name] for name in names]:
                mean = statistics.geometric_mean(inside)
                print(f"{one} / ours, {group}: geometric mean {mean:.3f}, {min(inside):.3f} to {max(inside):.3f}")
    for name, row in rows.items():
        if row["parts"]:
            print_parts(name, row["parts"])
        for engine, why in row["failures"].items():
            print(f"{name}: {engine} is not available: {why}")
        for fault in find_faults(row):
            print(f"{name}: WRONG: {fault}")


def print_parts(title: str, parts: Mapping[str, Mapping[str, float]]) -> None:
    """Print the parts of a call in each engine, in the order of the last one."""
    table = _table(title, ("part", *parts))
    names = dict.fromkeys(name for one in reversed(parts.values()) for name in one)
    for name in names:
        table.add_row(name, *(f"{one[name]:,.3f}" if name in one else "" for one in parts.values()))
    table.add_row("in all", *(f"{sum(one.values()):,.3f}" for one in parts.values()))
    _CONSOLE.print(table)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    return table
