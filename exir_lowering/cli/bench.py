"""`exir-lower bench`: measure the time and memory of a method, or compare two files."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from exir_lowering.cli import method_inputs
from exir_lowering.cli.output import OK, find_file, format_size, kept_from_stdout, print_table, quieten, say
from exir_lowering.errors import InputError

VERSION = 3  # incremented when a field of the JSON changes its meaning or is removed

_SECONDS, _LEAST, _MOST = 5.0, 10, 1000  # without --runs: how long, and how often at least and at most

EXAMPLES = """\
examples:
  exir-lower bench model.pte
  exir-lower bench model.pte --against other.pte --inputs inputs.pt --runs 200
  exir-lower bench llm.pte --method decode --json > bench.json
  exir-lower bench llm.pte --method decode --memory

Inputs are drawn, or given as for `exir-lower run`. A time is that of one call from Python, input checks included.
Warm-up calls, which set the method up, are not counted. Each file is in a process of its own; two files alternate call
by call, so that both see the same load.
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
    parser.add_argument(
        "--memory", action="store_true", help="measure the memory of a call instead, beside what `inspect` estimates"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, with all times")


def execute(arguments: argparse.Namespace) -> int:
    """Measure the file, or two in turns, and print the figures."""
    given = [(find_file(arguments.model), [*map(find_file, arguments.data)])]
    if arguments.against is not None:
        given.append((find_file(arguments.against), [*map(find_file, arguments.against_data)]))
    inputs = None if arguments.inputs is None else find_file(arguments.inputs)
    if arguments.warm_up < 0 or (arguments.runs is not None and arguments.runs < 2):
        raise InputError("bench: expected --warm-up of at least 0 and --runs of at least 2.")
    context, method, seed = multiprocessing.get_context("spawn"), arguments.method, arguments.seed
    with contextlib.ExitStack() as stack:  # a process for each file: what it takes does not depend on what ran before
        made = [ProcessPoolExecutor(1, context, signal.signal, (signal.SIGINT, signal.SIG_IGN)) for _ in given]
        pools = [stack.enter_context(pool) for pool in made]
        try:
            task = _take if arguments.memory else _open
            opening = [pool.submit(task, *one, method, inputs, seed) for pool, one in zip(pools, given, strict=True)]
            figures = [one.result() for one in opening]
            if arguments.memory:
                return _show_memory(figures, arguments.json)
            times = _measure(pools, arguments.warm_up, arguments.runs)
            for figure, pool, measured in zip(figures, pools, times, strict=True):
                figure["bytes"]["grew"] += pool.submit(_resident, "VmHWM").result()
                figure |= {"runs": len(measured), "seconds": _summarize(measured)}
        except KeyboardInterrupt:
            for child in multiprocessing.active_children():  # which do not hear it, and may be in a long call
                child.terminate()
            raise
        except BrokenProcessPool:
            raise InputError("the process of a file ended: it crashed, or there was not enough memory.") from None
    ratio = None  # the first one's time as a multiple of the second one's: the median of the rounds, and their quarters
    if len(given) > 1:
        rounds = (a / b for a, b in zip(*times, strict=True))
        ratio = dict(zip(("p25", "median", "p75"), statistics.quantiles(rounds, n=4), strict=True))
    if arguments.json:
        print(json.dumps({"version": VERSION, "files": figures, "ratio": ratio}, indent=2))
        return OK
    rows, shown = [], ("least", "p25", "median", "p75", "p90", "p99")
    for figure in figures:
        seconds = figure["seconds"]
        spread = f"{(seconds['p75'] - seconds['p25']) / seconds['median']:.0%}"
        rows.append((figure["file"], str(figure["runs"]), *(f"{seconds[name] * 1e3:.3f}" for name in shown), spread))
    right = ("calls", *shown, "spread")
    print_table(f"Milliseconds per call of {figures[0]['method']}", ("file", *right), rows, right=right)
    for figure in figures:
        sizes = figure["bytes"]
        say(
            f"{figure['file']}: {format_size(sizes['file'])}; planned memory {format_size(sum(sizes['planned']))}. "
            f"Its process grew by {format_size(sizes['grew'])}, beyond what Python, PyTorch and the runtime take."
        )
    say("Spread: from p25 to p75, where half of the calls lie, as a share of the median.")
    if ratio is not None:
        same = " That is no difference: it is within the spread." if ratio["p25"] <= 1 <= ratio["p75"] else ""
        say(
            f"{figures[0]['file']} takes {ratio['median']:.2f} times as long as {figures[1]['file']}: the median of "
            f"all rounds; half of them lie between {ratio['p25']:.2f} and {ratio['p75']:.2f}.{same}"
        )
    return OK


_ready: list[Callable[[], object]] = []  # in the process of a file: what calls its method


def _open(source: Path, data: Sequence[Path], wanted: str | None, given: Path | None, seed: int) -> dict[str, Any]:
    """Load a file and run its method once, in the file's process; return what is known of it without a measurement."""
    import sympy  # noqa: F401 - torch imports it when it computes shapes: it is no part of opening a file

    from exir_lowering._upstream.runtime import executorch_runtime
    from exir_lowering.runtime.program import open_file
    from exir_lowering.runtime.source import read_file

    executorch_runtime()
    before = _begin()
    with quieten(), kept_from_stdout(True):
        file = read_file(source, data or None, True)
        program = open_file(file, None)
        method = method_inputs.choose_method(wanted, program, source)
        inputs = method_inputs.make_inputs(given, seed, program, method)
        method = program.choose(method, *inputs).method
        program.run(method, *inputs)
    _ready.append(lambda: program.run(method, *inputs))
    sizes = {"file": source.stat().st_size, "planned": list(file.methods[method].arenas), "grew": -before}
    return {"file": str(source), "method": method, "bytes": sizes}


def _take(source: Path, data: Sequence[Path], wanted: str | None, given: Path | None, seed: int) -> dict[str, Any]:
    """Run a method once, with nothing else of its file open; return what that took, and what `inspect` estimates."""
    import sympy  # noqa: F401 - as in `_open`

    from exir_lowering._upstream.runtime import executorch_runtime
    from exir_lowering.inspection.reading import inspect
    from exir_lowering.runtime.engine import Engine, open_engine
    from exir_lowering.runtime.program import LoadedProgram
    from exir_lowering.runtime.source import read_file

    with quieten(), kept_from_stdout(True):
        file = read_file(source, data or None, True)
        closed = LoadedProgram(file, Engine(file, {}, {}))
        name = method_inputs.choose_method(wanted, closed, source)
        inputs = method_inputs.make_inputs(given, seed, closed, name)
        name = closed.choose(name, *inputs).method
        (device,) = (one.device for one in inspect(source, data=data or None).methods if one.name == name)
        one = replace(file, methods={name: file.methods[name]}, manifest=())
        executorch_runtime()
        before = _begin()
        program = LoadedProgram(one, open_engine(one, {}, "error"))
        program.run(name, *inputs)
        measured = {"running": _resident("VmRSS") - before, "peak": _resident("VmHWM") - before}
    return {"file": str(source), "method": name, "estimated": asdict(device), "measured": measured}


def _show_memory(figures: Sequence[dict[str, Any]], as_json: bool) -> int:
    if as_json:
        print(json.dumps({"version": VERSION, "files": figures}, indent=2))
        return OK
    from exir_lowering.pte.device_memory import DeviceMemory

    for figure in figures:
        measured = {name: f"{size:,}" for name, size in figure["measured"].items()}
        found = DeviceMemory(**figure["estimated"]).rows()
        rows = [(what, size, measured.get(name, "")) for name, size, what in found]
        right = ("estimated", "measured")
        print_table(f"Bytes of {figure['method']} in {figure['file']}", ("", *right), rows, right=right)
    say("Measured: what a process took for it that had loaded the runtime before.")
    return OK


def _call() -> float:
    start = time.perf_counter()
    _ready[0]()
    return time.perf_counter() - start


def _begin() -> int:
    """Let the peak of this process start again, from the memory that it has now, which is returned."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(name: str) -> int:
    """Return the memory that this process has, or had at its peak; where the system does not say it, the latter."""
    with contextlib.suppress(OSError):
        found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(found[name].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _measure(pools: Sequence[ProcessPoolExecutor], warm_up: int, runs: int | None) -> list[list[float]]:
    """Time calls in rounds of one call of each file; who is first changes from round to round."""
    for pool in pools:
        for _ in range(warm_up):
            pool.submit(_call).result()
    times, ends = [list[float]() for _ in pools], time.perf_counter() + _SECONDS * len(pools)
    for number in range(runs or _MOST):
        if runs is None and number >= _LEAST and time.perf_counter() > ends:
            break
        for index in sorted(range(len(pools)), reverse=bool(number % 2)):
            times[index].append(pools[index].submit(_call).result())
    return times


def _summarize(times: Sequence[float]) -> dict[str, Any]:
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    named = {f"p{at}": cuts[at - 1] for at in (25, 75, 90, 99)} | {"median": cuts[49]}
    return {"least": min(times), **named, "mean": statistics.fmean(times), "all": times}
