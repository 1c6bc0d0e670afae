"""Hunts for random programs on which something is wrong.

python tests/support/hunt.py KIND... [--count 1000] [--seed 0] [--seconds 3600]

edge-ops, edge-modules, edge-random: the two conversions to Edge dialect differ
rewrite-attention, -state, -ops, -modules, -random, -methods, -quantized: other results when rewritten
state, methods, compiled, many: state is wrong in some call: of one method, of two that share it, through torch.compile,
    or with many operators and half precision
flow: the file computes something else: conditions, loops, many operators, half precision
dynamo: something else through torch.compile

Children run a batch of programs each; the next one takes over where one dies. `--count 1 --seed N` runs a find again.
Exit status 1: something is wrong, a child died, or an error is not this package's.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("support", "dynamo", "fast", "steps/rewriting", "steps/state")]

import both_forms  # noqa: E402
import both_ways  # noqa: E402
import compiled_programs  # noqa: E402
import module_programs  # noqa: E402
import operator_programs  # noqa: E402
import random_state_runs  # noqa: E402
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # noqa: E402
from random_flow import export_random, run_random  # noqa: E402
from random_kinds import KINDS as REWRITTEN  # noqa: E402
from random_programs import NotExportable  # noqa: E402
from torch.export import ExportedProgram  # noqa: E402

from exir_lowering import LoweringError  # noqa: E402

SECONDS = 120
"""How long one program may take."""
BATCH = 100
SHOWN = 3
BAD = ("WRONG", "DIED", "BROKEN")
FILES = 20
"""Of how many rewritten programs one is run as a file."""

Found = list[tuple[str, str]]
"""Verdicts, and what they are about."""


def _edge_operators(seed: int) -> Found:
    """Compare the conversions of ten calls of operators; where something is found, call by call."""
    calls = []
    for number in range(10 * seed, 10 * seed + 10):
        with contextlib.suppress(Exception):  # torch cannot make some
            calls += [one] if (one := operator_programs.call(number)) is not None else []
    way = random.Random(seed).choice([way for way in both_ways.WAYS if way.rpartition(" ")[2] in _LENIENT])
    quiet = [one for one in calls if not one.writes]
    found: Found = []
    for group in (quiet, *([one] for one in calls if one.writes)):
        together = _converted(lambda group=group: operator_programs.export_calls(group), way)
        if any(verdict != "equal" for verdict, _ in together) and len(group) > 1:
            for one in group:
                alone = _converted(lambda one=one: operator_programs.export_calls([one]), way)
                found += [(verdict, f"{about} ({one.name})") for verdict, about in alone]
        else:
            found += together
    return found


_LENIENT = ("unchecked", "order", "preserving")


def _edge(make: Callable[[int], tuple[object, ...]]) -> Callable[[int], Found]:
    way = lambda seed: random.Random(seed * 7 + 1).choice(["xnnpack", "none", *both_ways.WAYS])  # noqa: E731
    return lambda seed: _converted(lambda: make(seed)[1], way(seed))  # type: ignore[arg-type, return-value]


def _converted(make: Callable[[], ExportedProgram], way: str) -> Found:
    try:
        with both_ways.quiet():
            program = make()
    except Exception as error:
        return [("not exported", type(error).__name__)]
    outcome = both_ways.compare(program, way)
    if outcome.differences:
        return [("WRONG", f"{way}: {'; '.join(outcome.differences[:6])}")]
    return [
        ("raises alike", "")
        if outcome.error
        else ("left to ExecuTorch" if outcome.left else "equal", "".join(outcome.left[:1]))
    ]


def _rewritten(kind: str, seed: int) -> Found:
    try:
        with both_ways.quiet():
            _, program, calls = REWRITTEN[kind](seed)
    except Exception as error:
        return [("not exported", type(error).__name__)]
    partitioners = (XnnpackPartitioner(),) if seed % 4 == 3 or kind == "quantized" else ()
    try:
        found = both_forms.compare(program, calls, partitioners, thorough=seed % 10 == 0)
        if seed % FILES == 0 and isinstance(program, ExportedProgram):
            chosen = [None, "xnnpack", ["xnnpack", "reference"]][seed // FILES % 3]
            found.differences += both_forms.run_files(program, calls, chosen)
    except Exception as error:
        return [("not converted", f"{type(error).__name__}: {error}")]
    if found.differences:
        return [("WRONG", f"{dict(found.rewritten)}: {'; '.join(found.differences[:4])}")]
    return [("rewritten", " ".join(sorted(found.rewritten))) if found.rewritten else ("equal", "")]


def _dynamo(seed: int) -> Found:
    outcome = compiled_programs.compare(seed, most=14, nested=["cond"] if seed % 4 == 3 else (), training=seed % 3 > 0)
    return [("left to PyTorch", reason) for reason in outcome.fallbacks] or [("equal", "")]


def _flow(seed: int) -> Found:
    wrong = run_random(seed, many=True)
    return [("WRONG", wrong) if wrong else ("equal", "")]


def _state(kind: str, seed: int) -> Found:
    return [(verdict, f"{way}: {about}") for verdict, about, way in random_state_runs.outcomes(seed, kind)]


KINDS: Mapping[str, Callable[[int], Found]] = {
    "edge-ops": _edge_operators,
    "edge-modules": _edge(module_programs.make),
    "edge-random": _edge(export_random),
    **{f"rewrite-{kind}": lambda seed, kind=kind: _rewritten(kind, seed) for kind in REWRITTEN},
    **{kind: lambda seed, kind=kind: _state(kind, seed) for kind in random_state_runs.KINDS},
    "flow": _flow,
    "dynamo": _dynamo,
}


def find(kind: str, seed: int) -> Found:
    """Return the verdicts on the program of a seed."""
    try:
        return KINDS[kind](seed)
    except NotExportable:
        return [("not exported", "")]
    except LoweringError as error:
        return [("refused", f"{type(error).__name__}: {error}"[:300])]
    except Exception as error:
        if "modified by an inplace operation" in str(error):
            return [("not differentiated by AOTAutograd", "")]  # whatever the backend
        return [("BROKEN", f"{type(error).__name__}: {error}"[:1000])]


def in_children(kind: str, seeds: list[int], end: float) -> Iterator[tuple[int, Found]]:
    """Yield the verdicts on the programs of seeds, which children make."""
    left = list(seeds)
    while left and time.monotonic() < end:
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reads)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            with os.fdopen(writes, "w") as pipe:
                for seed in left[:BATCH]:
                    if time.monotonic() > end:
                        break
                    signal.alarm(SECONDS)
                    with contextlib.redirect_stdout(io.StringIO()):
                        found = find(kind, seed)
                    pipe.write(json.dumps([seed, found]) + "\n")
                    pipe.flush()
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads) as pipe:
            for line in pipe:
                seed, found = json.loads(line)
                left.remove(seed)
                yield seed, found
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == -signal.SIGALRM:
            yield left.pop(0), [("took too long", "")]
        elif code != 0:
            yield left.pop(0), [("DIED", f"exit status {code}")]


def hunt(kind: str, seeds: list[int], seconds: float) -> bool:
    """Print what is found of a kind; return whether something is wrong."""
    counts: Counter[str] = Counter()
    classes: Counter[tuple[str, str]] = Counter()
    for seed, found in in_children(kind, seeds, time.monotonic() + seconds):
        counts["programs"] += 1
        for verdict, about in found:
            counts[verdict] += 1
            sort = (verdict, re.sub(r"\d+", "N", about)[:110])
            classes[sort] += 1
            if verdict in BAD and classes[sort] <= SHOWN:
                print(f"{verdict} {kind} --count 1 --seed {seed}: {about}", flush=True)
    print(f"\n{kind}:", dict(counts.most_common()))
    for (verdict, about), count in classes.most_common():
        print(f"  {count:6} {verdict}: {about}\n" * (verdict != "equal" and bool(about)), end="")
    return any(counts[verdict] for verdict in BAD)


def main() -> int:
    """Hunt; return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--seconds", type=float, default=1e9, help="for each kind")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    random_state_runs.warm_up()
    seeds = list(range(arguments.seed, arguments.seed + arguments.count))
    wrong = [kind for kind in arguments.kinds if hunt(kind, seeds, arguments.seconds)]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
