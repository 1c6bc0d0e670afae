"""What `verify` found as text: what is off in words first, then a table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from exir_lowering.plans.formatting import many
from exir_lowering.pte.printing import render

if TYPE_CHECKING:
    from exir_lowering.verification.results import MethodResult, OutputResult, Verification

_ROWS, _LISTED = 12, 4
"""How many outputs the table has, and how many things a list names before it counts the others."""

_WIDE = 100
"""How many characters the table with all columns needs."""


def to_text(found: Verification, width: int) -> str:
    """Return what was found as plain text."""
    return render(_parts(found, width), width)


def _parts(found: Verification, width: int) -> Iterator[RenderableType]:
    yield Text(summary(found))
    for method in found.methods.values():
        for line in problems(method):
            yield Padding(Text(line), (0, 0, 0, 2))
    for method in found.methods.values():
        yield from _where(method, found.engine)
    yield Text("")
    yield _table(found, width)
    for method in found.methods.values():
        for line in _notes(method):
            yield Text(line)
    if found.unverified:
        yield Text(f"Not verified, as no program was given: {_some(found.unverified)}.")
    drawn = "" if found.seed is None else f" Inputs were generated with seed {found.seed}."
    engine = "ExecuTorch's runtime" if found.engine == "runtime" else "the interpreter, not ExecuTorch's runtime,"
    yield Text(f"Run in {engine} and in eager PyTorch.{drawn}")


def summary(found: Verification) -> str:
    """Say in a sentence whether a file matches."""
    off = [name for name, method in found.methods.items() if not method.ok]
    calls = many(sum(method.calls for method in found.methods.values()), "call")
    if not off:
        return f"{found.file} matches eager PyTorch in {calls} of {many(len(found.methods), 'method')}."
    return f"{found.file} differs from eager PyTorch: {_some(off)} of {many(len(found.methods), 'method')}, in {calls}."


def problems(method: MethodResult) -> Iterator[str]:
    """Say in sentences what is off in a method, the worst first."""
    if method.problem:
        yield f"{method.name} failed: {method.problem}"
    off = sorted((output for output in method.outputs if not output.ok), key=_badness, reverse=True)
    for output in off[:_LISTED]:
        yield f"{method.name}, output {output.index} ({output.name}) {_what(output)}."
    if len(off) > _LISTED:
        yield f"{method.name}: and {many(len(off) - _LISTED, 'more output')}."


def _what(output: OutputResult) -> str:
    what = output.problem or f"is off by {output.largest_error:.3g}; allowed: {output.allowed_error:.3g}"
    others = [name for name in output.off if name != output.case]
    more = f"; off too: {_some(others)}" if others else ""
    return f'{what}: in "{output.case}", call {output.call}{more}'


def _where(method: MethodResult, engine: str) -> Iterator[RenderableType]:
    compared = many(len(method.errors), "part")
    own = [error for error in method.errors if error.local > 1]
    for error in own[:_LISTED]:
        source = f": {error.source}" if error.source else "."
        off = f"{error.what} is off by {error.largest_error:.3g} on PyTorch's own inputs"
        yield Padding(Text(f"{method.name}: of {compared} of the file that were compared, {off}{source}"), (0, 0, 0, 2))
    if method.errors and not own:
        none = f"{method.name}: none of {compared} of the file that were compared is off on PyTorch's own inputs."
        if engine == "runtime":
            none += (
                " They were executed with PyTorch's kernels: if the file is right with the engine "
                '"interpreter", a kernel of ExecuTorch\'s runtime is wrong.'
            )
        yield Padding(Text(none), (0, 0, 0, 2))


def _table(found: Verification, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    wide = width >= _WIDE
    columns = ["output", "dtype", "", "largest", "allowed", "mean", "relative", "SQNR", "cosine", "worst in"]
    shown = columns if wide else [name for name in columns if name not in ("dtype", "mean", "relative", "cosine")]
    for name in shown:
        table.add_column(name, justify="left" if name in ("output", "dtype", "", "worst in") else "right")
    rows = [(method, output) for method in found.methods.values() for output in method.outputs]
    rows.sort(key=lambda row: _badness(row[1]), reverse=True)
    for method, output in rows[:_ROWS]:
        cells = dict(zip(columns, _cells(method, output), strict=True))
        table.add_row(*(Text(cells[name]) for name in shown))
    if len(rows) > _ROWS:
        table.add_row(Text(f"and {len(rows) - _ROWS:,} more"))
    return table


def _cells(method: MethodResult, output: OutputResult) -> tuple[str, ...]:
    return (
        f"{method.name} {output.index}",
        output.dtype,
        "ok" if output.ok else "OFF",
        f"{output.largest_error:.2g}",
        f"{output.allowed_error:.2g}",
        f"{output.mean_error:.2g}",
        f"{output.relative_error:.2g}",
        "equal" if output.sqnr == math.inf and output.ok else f"{output.sqnr:.0f} dB",
        f"{output.cosine:.6f}",
        f"{output.case}, call {output.call}",
    )


def _badness(output: OutputResult) -> tuple[bool, float]:
    share = output.largest_error / output.allowed_error if output.allowed_error else output.largest_error
    return not output.ok, math.inf if output.problem else share


def _notes(method: MethodResult) -> Iterator[str]:
    skipped = ""
    if method.skipped:
        skipped = f"; {many(method.skipped, 'call')} left out, as PyTorch refused the inputs: {method.skipped_reason}"
    kind = ", quantised" * method.quantized + ", with state" * method.stateful
    yield f"{method.name}{kind}: {many(len(method.cases), 'case')}, {many(method.calls, 'call')}{skipped}."
    for note in method.notes[:2]:
        yield f"{method.name}, not counted: {note}."


def _some(names: tuple[str, ...] | list[str]) -> str:
    listed = ", ".join(names[:_LISTED])
    return listed + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
