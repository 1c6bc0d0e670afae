"""Hunts for damaged files that raise what is not this package's, or, though their digests are checked, end the process.

python tests/pte/hunt.py --count 5000

Every mutant is loaded and run, in forked children: with its digests, and with digests that were computed
anew. Exit status 1: one did what none may do; `fuzzing.reproduce` makes it again.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from fuzz_samples import KINDS, kind
from fuzzing import fuzz

WAYS = {"checked": {"verify": "full"}, "resealed": {"verify": "full", "reseal": True}}


def main() -> int:
    """Hunt; return 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000, help="mutants of all kinds together (default: 5000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one of each kind (default: 0)")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    arguments = parser.parse_args()
    each = -(-arguments.count // len(arguments.kinds))
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for name in arguments.kinds:
        files = kind(name)
        for way in arguments.ways:
            report = fuzz(files, range(arguments.seed, arguments.seed + each), **WAYS[way])  # type: ignore[arg-type]
            print(f"{name}, {way}: {dict(report.counts)}", *report.failures, sep="\n  ", flush=True)
            counts += report.counts
            failures += report.failures
            if way == "checked":
                failures += [f"{name}: seed {seed} ended the process" for seed in report.ended]
    print(f"{sum(counts.values())} runs of {each * len(arguments.kinds)} mutants: {dict(counts)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
