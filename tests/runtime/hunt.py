"""Hunts for calls of kernels that `load` refuses though the runtime is right, or accepts though it ends the process.

python tests/runtime/hunt.py --each 4 --mixed 8

Exit status 1: there is one, or one that the package's own compiler or interpreter does wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from kernel_calls import Outcome, compare, kernels_of_the_runtime, operators, sample_calls  # noqa: E402


def main() -> int:
    """Hunt; return 1 if there is a defect of this package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=4, help="calls of an operator with each type")
    parser.add_argument("--mixed", type=int, default=8, help="calls of an operator with mixed types")
    parser.add_argument("--empty", type=int, default=4, help="calls of an operator with empty tensors")
    parser.add_argument("--operators", default="", help="a pattern for the names of operators")
    parser.add_argument("--part", default="0/1", help="which of how many parts")
    parser.add_argument("--save", help="a file for all outcomes")
    parser.add_argument("--seconds", type=float, default=1e9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    end = time.monotonic() + arguments.seconds
    part, parts = map(int, arguments.part.split("/"))
    counts, shown, covered = Counter(), defaultdict(list), Counter()
    out = open(arguments.save, "w") if arguments.save else None
    for op in [op for op in operators() if re.search(arguments.operators, op.full_name)][part::parts]:
        if time.monotonic() > end:
            print("time is over at", op.full_name)
            break
        for outcome in outcomes(list(sample_calls(op, arguments.each, arguments.mixed, arguments.empty)), covered):
            kind = outcome.kind
            counts[kind] += 1
            if outcome.runtime == "right": covered.update(outcome.kernels)
            if out: print(json.dumps({"kind": kind, **asdict(outcome)}), file=out, flush=True)
            if kind.isupper() or kind.split()[0].isupper():
                print(kind, outcome.name[:150], "|", outcome, flush=True) if not out else None
    print(json.dumps(counts, indent=1)); print(len(covered), "kernels;", sorted(kernels_of_the_runtime() - set(covered)))
    return 0


def outcomes(calls, covered):
    """Compare the calls of an operator: a few if the runtime has no kernels for it."""
    known, first = kernels_of_the_runtime(), []
    for outcome in compare(calls[:4]):
        first.append(outcome)
        yield outcome
    if all(not one.kernels or not known.issuperset(one.kernels) for one in first) and not any("eager" in one.lowering for one in first):
        return
    kernels = {kernel for one in first for kernel in one.kernels}
    seen = kernels and all(covered[kernel] > 90 for kernel in kernels)
    yield from compare(calls[4::8] if seen else calls[4:])


if __name__ == "__main__":
    sys.exit(main())
