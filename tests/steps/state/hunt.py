"""Hunts for programs whose state is wrong in some call, lowered in some way.

python tests/steps/state/hunt.py --kind state|methods|compiled|many --count 1000 --seed 0

`state` is one method, `methods` are two that share their state, `compiled` is one through torch.compile, `many` is one
that draws from many operators and from half precision. A child process runs a batch of programs; the next one takes
over where it dies. Exit status 1: a number is wrong, a child died, or there was an error that is not this package's.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "support")]

import random_state_programs as programs  # noqa: E402
import random_state_runs as runs  # noqa: E402

_SECONDS = 120
_BATCH = 100
_SHOWN = 3
BAD = ("WRONG", "DIED", "BROKEN")


def in_children(seeds: list[int], arguments: argparse.Namespace) -> Iterator[tuple[int, list[list[str]]]]:
    """Run the programs of seeds in children, a batch in each; yield the outcomes of each seed."""
    left = list(seeds)
    while left:
        batch = left[:_BATCH]
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reads)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            with os.fdopen(writes, "w") as pipe:
                for seed in batch:
                    signal.alarm(_SECONDS)
                    with contextlib.redirect_stdout(io.StringIO()):
                        found = one(seed, arguments)
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
        if code != 0:
            yield left.pop(0), [["DIED", f"exit status {code}", ""]]


def one(seed: int, arguments: argparse.Namespace) -> list[list[str]]:
    """Return the outcomes of the program of a seed: of each way the verdict, what it is about, and the way."""
    try:
        return runs.outcomes(seed, arguments.kind, arguments.ways, arguments.way)
    except Exception as error:
        return [["BROKEN", f"{type(error).__name__}: {error}"[:300], ""]]


def main() -> int:
    """Hunt; return 1 if a number is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=runs.KINDS, default="state")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--ways", type=int, default=3, help="how many ways each program is lowered in")
    parser.add_argument("--way", help="this one instead, as it is printed")
    parser.add_argument("--shown", type=int, default=_SHOWN, help="how many programs of a class are printed")
    parser.add_argument("--seconds", type=float, default=1e9)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runs.warm_up()
    start = time.monotonic()
    counts: Counter[str] = Counter()
    classes: Counter[tuple[str, str]] = Counter()
    seeds = list(range(arguments.seed, arguments.seed + arguments.count))
    for seed, found in in_children(seeds, arguments):
        counts["programs"] += 1
        counts["with an error"] += any(verdict == "refused" for verdict, *_ in found)
        for verdict, about, way in found:
            counts[verdict] += 1
            sort = (verdict, re.sub(r"\d+", "N", about)[:110])
            classes[sort] += verdict != "equal"
            if verdict != "equal" and classes[sort] <= arguments.shown:
                _show(f"{verdict} --kind {arguments.kind} --count 1 --seed {seed} --way {way!r}: {about}", verdict)
        if time.monotonic() - start > arguments.seconds:
            print("time is over after seed", seed)
            break
    seconds = time.monotonic() - start
    print(f"\n{arguments.kind}: {counts['programs']} programs, {seconds / max(counts['programs'], 1):.2f} s each")
    print(*(f"  {count:6} {verdict}" for verdict, count in counts.most_common()), sep="\n")
    for (verdict, about), count in classes.most_common():
        print(f"  {count:6} {verdict}: {about}" * (count > 0))
    return int(any(counts[verdict] for verdict in BAD))


def _show(what: str, verdict: str) -> None:
    print(what, flush=True)
    if verdict in BAD:
        kind, seed = re.findall(r"--kind (\w+) --count 1 --seed (\d+)", what)[0]
        with contextlib.suppress(Exception):
            made = programs.make(int(seed), runs.KINDS[kind], kind == "many")
            print(*("    " + line for line in str(made).splitlines()), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
