"""Hunts for programs that give other results when they are rewritten.

python tests/steps/rewriting/hunt.py --kind attention|state|ops|modules|random|methods|quantized --count 1000 --seed 0

Exit status 1: a program differs.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from torch.export import ExportedProgram

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "fast"), str(HERE.parents[1] / "support")]

import both_forms  # noqa: E402
from both_ways import quiet  # noqa: E402
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # noqa: E402
from random_kinds import KINDS  # noqa: E402

_SECONDS = 60
_SHOWN = 3
_MOST_FAILURES = 40
"""After some errors torch exports nothing any more in a process."""


class Hunt:
    """Compares programs of one kind, and counts what was found."""

    def __init__(self, kind: str, files: int, thorough: int, mutants: int) -> None:
        self.kind, self.files, self.thorough, self.mutants = kind, files, thorough, mutants
        self.failures = 0  # in a row
        self.counts: Counter[str] = Counter()
        self.rewritten: Counter[str] = Counter()
        self.classes: Counter[str] = Counter()

    def compare(self, seed: int, partitioned: bool) -> None:
        """Make the program of a seed and compare its forms."""
        try:
            with quiet():
                name, program, calls = KINDS[self.kind](seed)
        except Exception as error:
            self.counts[f"not exported: {type(error).__name__}"] += 1
            self.failures += 1
            return
        self.failures = 0
        partitioners = (XnnpackPartitioner(),) if partitioned or self.kind == "quantized" else ()
        try:
            thorough = seed % self.thorough == 0
            found = both_forms.compare(program, calls, partitioners, thorough=thorough, mutants=self.mutants)
            if self.files and seed % self.files == 0 and isinstance(program, ExportedProgram):
                chosen = [None, "xnnpack", ["xnnpack", "reference"]][seed // self.files % 3]
                found.differences += both_forms.run_files(program, calls, chosen)
                self.counts["files"] += 1
        except Exception as error:
            self.counts[f"not converted: {type(error).__name__}"] += 1
            if self.counts[f"not converted: {type(error).__name__}"] <= _SHOWN:
                print(f"not converted: --kind {self.kind} --seed {seed}: {type(error).__name__}: {str(error)[:300]}")
            return
        self.counts["programs"] += 1
        self.counts["partitioned"] += bool(partitioners)
        self.counts["rewritten"] += bool(found.rewritten)
        self.counts["runs"] += found.runs
        self.counts["mutants"] += found.mutants
        self.rewritten.update(dict.fromkeys(found.rewritten, 1))
        if found.differences:
            self._show(f"--kind {self.kind} --count 1 --seed {seed}{' --partitioned' * partitioned}: {name}", found)

    def _show(self, what: str, found: both_forms.Outcome) -> None:
        self.counts["WRONG"] += 1
        sort = re.sub(r"\d+", "N", found.differences[0])[:60] + " " + " ".join(sorted(found.rewritten))
        self.classes[sort] += 1
        if self.classes[sort] <= _SHOWN:
            print(f"WRONG {what} ({dict(found.rewritten)})", *found.differences[:4], sep="\n    ", flush=True)

    def print(self) -> None:
        """Print the counts: of programs, and of programs in which each rewrite did something."""
        print(self.kind, dict(self.counts))
        print("    rewritten:", dict(self.rewritten.most_common()))
        for sort, count in self.classes.most_common():
            print("    WRONG", count, sort)


class TookTooLong(BaseException):
    """Some programs end too late."""


def _too_long(*_: object) -> None:
    raise TookTooLong


def main() -> int:
    """Hunt; return 1 if a program differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="attention")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--partitioned", action="store_true", help="with XNNPACK's partitioner; else for one in four")
    parser.add_argument("--files", type=int, default=0, help="run every so many programs as files too")
    parser.add_argument("--thorough", type=int, default=10, help="check every so many that inputs stay as they are")
    parser.add_argument("--mutants", type=int, default=0, help="compare so many random changes of each program too")
    parser.add_argument("--seconds", type=float, default=1e9)
    arguments = parser.parse_args()
    signal.signal(signal.SIGALRM, _too_long)
    torch.set_num_threads(1)
    end = time.monotonic() + arguments.seconds
    hunt = Hunt(arguments.kind, arguments.files, arguments.thorough, arguments.mutants)
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        if time.monotonic() > end or hunt.failures >= _MOST_FAILURES:
            print("time is over" if time.monotonic() > end else "torch exports nothing any more", "at seed", seed)
            break
        signal.alarm(_SECONDS)
        try:
            hunt.compare(seed, arguments.partitioned or seed % 4 == 3)
        except TookTooLong:
            hunt.counts["took too long"] += 1
        signal.alarm(0)
    hunt.print()
    return int(hunt.counts["WRONG"] > 0)


if __name__ == "__main__":
    sys.exit(main())
