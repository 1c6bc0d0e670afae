"""Vendors' backends beside ExecuTorch's own way to them: `python tests/benchmarks/vendors.py`.

For each vendor and model: partitions, operators on the host, bytes of the payloads with their named data, the cycles
that Vela estimates for Ethos-U, and CPU seconds from the program to the file, as ExecuTorch's
`to_edge_transform_and_lower(...).to_executorch()` has them -> as `lower(...).emit()` has them with its defaults. Each
lowering is in a process of its own, which has lowered one layer for the vendor before: its compiler is imported.
What a vendor cannot lower is a row with its error. A last row has ExecuTorch's CPU seconds divided by ours, the mean of
the vendor's rows (geometric). `--markdown` prints the table of docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

for folder in ("support", "backends/vendors"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from vendor_models import MODELS, build  # noqa: E402
from vendor_shelf import VENDORS, Lowered, programs_of, with_executorch, with_ours  # noqa: E402

COLUMNS = ("partitions", "on the host", "bytes", "cycles", "CPU s")
ENGINES = {"executorch": with_executorch, "ours": with_ours}
Row = Mapping[str, Any]


def lower_here(engine: str, vendor: str, model: str, precision: str) -> Row:
    """Lower in this process, one layer first, so that the vendor's compiler is imported."""
    found = VENDORS[vendor]
    layer = {"forward": (torch.nn.Linear(4, 2).eval(), (torch.ones(1, 4),))}
    ENGINES[engine](found, programs_of(found, layer, precision), precision)
    lowered: Lowered = ENGINES[engine](found, programs_of(found, build(model), precision), precision)
    host = sum(map(len, lowered.host.values()))
    values = (len(lowered.delegates), host, lowered.payload_bytes, lowered.cycles, round(lowered.seconds, 2))
    return dict(zip(COLUMNS, values, strict=True))


def lower(engine: str, vendor: str, model: str, precision: str, limit: int) -> Row:
    """Lower in a process of its own; what fails is a row with the error."""
    command = [sys.executable, "-W", "ignore", __file__, "--here", engine, vendor, model, precision]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {limit} seconds"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["died"])[-1][:80]}
    return json.loads(done.stdout.splitlines()[-1])


def cells(rows: Mapping[str, Row]) -> Sequence[str]:
    """Return a row's cells: ExecuTorch's value -> ours, once if they are equal."""
    theirs, ours = rows["executorch"], rows["ours"]
    if "error" in theirs or "error" in ours:
        said = [f"{name}: {one['error']}" for name, one in rows.items() if "error" in one]
        return ["; ".join(said), *[""] * (len(COLUMNS) - 1)]
    texts = []
    for column in COLUMNS:
        first, second = (
            f"{one[column]:,.1f}" if column == "CPU s" else f"{one[column]:,.0f}" for one in (theirs, ours)
        )
        texts.append(
            ""
            if first == second == "0" and column == "cycles"
            else first
            if first == second
            else f"{first} -> {second}"
        )
    return texts


def mean_of(rows: Sequence[Mapping[str, Row]]) -> str:
    """Return the geometric mean of ExecuTorch's seconds over ours, of the rows without an error."""
    ratios = [
        one["executorch"]["CPU s"] / one["ours"]["CPU s"] for one in rows if all("CPU s" in e for e in one.values())
    ]
    return f"{geometric_mean(ratios):.2f}x, of {len(ratios)}" if ratios else ""


def main() -> None:
    """Make the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vendors", nargs="+", choices=VENDORS, default=list(VENDORS))
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=["cnn", "cached_attention", "lstm", "vit", "bert"]
    )
    parser.add_argument("--precision", nargs="+", choices=("float", "int8"), help="by default float where there is one")
    parser.add_argument("--limit", type=int, default=900, help="seconds that one lowering may take")
    parser.add_argument("--json", type=Path, help="where the figures are added, after each row")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument("--here", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(lower_here(*arguments.here)))
        return
    table = Table(title="ExecuTorch -> ours", show_lines=False)
    for column in ("vendor", "model", *COLUMNS):
        table.add_column(column, justify="left" if column in ("vendor", "model") else "right")
    lines, figures = [], {}
    for vendor in arguments.vendors:
        if missing := VENDORS[vendor].missing:
            print(f"{vendor} needs {', '.join(missing)}: the extra vendors", file=sys.stderr)
            continue
        for precision in arguments.precision or VENDORS[vendor].precisions[:1]:
            for model in arguments.models if precision in VENDORS[vendor].precisions else ():
                rows = {engine: lower(engine, vendor, model, precision, arguments.limit) for engine in ENGINES}
                line = [f"{vendor}, {precision}", model, *cells(rows)]
                lines.append(line)
                table.add_row(*line)
                figures[f"{vendor}/{precision}/{model}"] = rows
                print(" | ".join(line), file=sys.stderr, flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(figures, indent=2))
            mine = [rows for key, rows in figures.items() if key.startswith(f"{vendor}/{precision}/")]
            if said := mean_of(mine):
                lines.append([f"{vendor}, {precision}", "geometric mean", "", "", "", "", said])
                table.add_row(*lines[-1])
    if arguments.markdown:
        print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    else:
        Console().print(table)


if __name__ == "__main__":
    main()
