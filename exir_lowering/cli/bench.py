"""`exir-lower bench`: measure the time and memory of a method, or compare two files."""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exir_lowering.cli import method_inputs
from exir_lowering.cli.output import OK, find_file, format_size, kept_from_stdout, print_table, say
from exir_lowering.errors import InputError

VERSION = 2
"""Incremented when a field of the JSON changes its meaning or is removed."""

_SECONDS, _LEAST, _MOST = 5.0, 10, 1000
"""How long the calls are repeated for unless --runs says how often, at least and at most how often."""

EXAMPLES = """\
examples:
  exir-lower bench model.pte
  exir-lower bench model.pte --against other.pte --inputs inputs.pt --runs 200
  exir-lower bench llm.pte --method decode --json > bench.json

Inputs are given as for `exir-lower run`. A time is that of one call from Python, input checks included. Warm-up calls,
which set the method up, are not counted. Two files alternate call by call, so that both see the same load.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL.pte", help="the file")
    parser.add_argument("--against", metavar="OTHER.pte", help="another file to compare with; the calls alternate")
    parser.add_argument("--method", help='the method (default: "forward", or the only one there is)')
    method_inputs.add_argument(parser)
    method_inputs.add_data(parser, whose="MODEL.pte")
    method_inputs.add_data(parser, "--against-data", "OTHER.pte")
    parser.add_argument("--warm-up", type=int, default=3, metavar="N", help="calls that are not counted (default: 3)")
    parser.add_argument(
        "--runs",
        type=int,
        metavar="N",
        help=f"measured calls of each file (default: {_SECONDS:g} seconds of calls, from {_LEAST} to {_MOST})",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, with all times")


@dataclass(frozen=True, slots=True)
class Subject:
    """A file whose method is measured."""

    name: str
    call: Callable[[], object]
    method: str
    file_bytes: int
    planned: tuple[int, ...]  # the sizes of the method's planned memory
    times: list[float] = field(default_factory=list)  # of each call, in seconds

    def describe(self) -> dict[str, Any]:
        """Return the figures for JSON: seconds and bytes."""
        cuts = statistics.quantiles(self.times, n=100, method="inclusive")
        seconds: dict[str, Any] = {"least": min(self.times)}
        seconds |= {
            name: cuts[at - 1] for name, at in (("p25", 25), ("median", 50), ("p75", 75), ("p90", 90), ("p99", 99))
        }
        seconds |= {"mean": statistics.fmean(self.times), "all": self.times}
        sizes = {"file": self.file_bytes, "planned": list(self.planned)}
        return {"file": self.name, "method": self.method, "runs": len(self.times), "seconds": seconds, "bytes": sizes}


def execute(arguments: argparse.Namespace) -> int:
    """Measure the file, or two in turns, and print the figures."""
    given = [(find_file(arguments.model), [find_file(path) for path in arguments.data])]
    if arguments.against is not None:
        given.append((find_file(arguments.against), [find_file(path) for path in arguments.against_data]))
    inputs = None if arguments.inputs is None else find_file(arguments.inputs)
    if arguments.warm_up < 0 or (arguments.runs is not None and arguments.runs < 2):
        raise InputError("bench: expected --warm-up of at least 0 and --runs of at least 2.")
    with kept_from_stdout(arguments.json):
        opened = [_open(source, data, arguments, inputs) for source, data in given]
        for subject in opened:
            for _ in range(arguments.warm_up):
                subject.call()
        _measure(opened, arguments.runs)
    figures = [subject.describe() for subject in opened]
    ratio = None  # the first one's time as a multiple of the second one's: the median of the rounds, and their quarters
    if len(opened) > 1:
        rounds = (a / b for a, b in zip(*(subject.times for subject in opened), strict=True))
        ratio = dict(zip(("p25", "median", "p75"), statistics.quantiles(rounds, n=4), strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if arguments.json:
        print(json.dumps({"version": VERSION, "peak_bytes": peak, "files": figures, "ratio": ratio}, indent=2))
        return OK
    rows, names = [], [one.name for one in opened]
    for figure in figures:
        ms = {name: f"{value * 1e3:.3f}" for name, value in figure["seconds"].items() if name != "all"}
        spread = f"{ms['p25']} to {ms['p75']}"
        rows.append((figure["file"], str(figure["runs"]), ms["median"], spread, ms["p90"], ms["p99"], ms["least"]))
    right = ("calls", "median", "p25 to p75", "p90", "p99", "least")
    print_table(f"Milliseconds per call of {opened[0].method}", ("file", *right), rows, right=right)
    for one in opened:
        say(f"{one.name}: {format_size(one.file_bytes)}; planned memory {format_size(sum(one.planned))}.")
    say(f"Peak memory of the process, Python and PyTorch included: {format_size(peak)}.")
    if ratio is not None:
        say(
            f"{names[0]} takes {ratio['median']:.2f} times as long as {names[1]}: the median of all rounds; half of "
            f"them lie between {ratio['p25']:.2f} and {ratio['p75']:.2f}."
        )
    return OK


def _open(source: Path, data: Sequence[Path], arguments: argparse.Namespace, given: Path | None) -> Subject:
    """Load a file, and run its method once."""
    from exir_lowering.runtime.program import open_file
    from exir_lowering.runtime.source import read_file

    file = read_file(source, list(data) or None, True)
    program = open_file(file, None)
    method = method_inputs.choose_method(arguments.method, program, source)
    inputs = method_inputs.make_inputs(given, arguments.seed, program, method)
    method = program.choose(method, *inputs).method
    program.run(method, *inputs)
    size, arenas = source.stat().st_size, file.methods[method].arenas
    return Subject(str(source), lambda: program.run(method, *inputs), method, size, arenas)


def _measure(opened: Sequence[Subject], runs: int | None) -> None:
    """Time calls in rounds of one call of each file; who is first changes from round to round."""
    ends = time.perf_counter() + _SECONDS * len(opened)
    for number in itertools.count():
        enough = number >= _LEAST and (number >= _MOST or time.perf_counter() > ends)
        if enough if runs is None else number == runs:
            return
        for subject in reversed(opened) if number % 2 else opened:
            start = time.perf_counter()
            subject.call()
            subject.times.append(time.perf_counter() - start)
