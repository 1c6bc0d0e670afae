"""Hunts for calls of kernels that `load` refuses though the runtime is right, or accepts though it ends the process.

python tests/runtime/hunt.py --each 3 --mixed 6 --empty 4

The calls are the samples that torch tests its operators with, in each type, with mixed types and without elements, and
those of quantised kernels by files that make a call that is right, or wrong in one thing.
Exit status 1: there is such a call, or one that the package's own compiler does wrong.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from kernel_calls import Call, Outcome, compare, kernels_of_the_runtime, operators, sample_calls
from quantized_calls import kernel_calls, program_calls, quantized_kernels

_FIRST = 4
"""How many calls of an operator show which kernels it has."""
_ENOUGH = 90
"""After how many right calls of each of its kernels only every eighth call of an operator is made."""


def main() -> int:
    """Hunt; return 1 if there is a defect of this package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=3, help="calls of an operator with each type")
    parser.add_argument("--mixed", type=int, default=6, help="calls of an operator with mixed types")
    parser.add_argument("--empty", type=int, default=4, help="calls of an operator with empty tensors")
    parser.add_argument(
        "--changed", type=int, default=2, help="calls of a quantised kernel that are changed in each way"
    )
    parser.add_argument("--operators", default="", help="a pattern for the names of operators")
    parser.add_argument("--seconds", type=float, default=1e9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    end = time.monotonic() + arguments.seconds
    defects = _hunt_quantized(arguments, end)
    counts: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for op in operators():
        if not re.search(arguments.operators, op.full_name):
            continue
        if time.monotonic() > end:
            print("time is over at", op.full_name)
            break
        for outcome in _outcomes(list(sample_calls(op, arguments.each, arguments.mixed, arguments.empty)), right):
            counts[outcome.kind] += 1
            if outcome.runtime == "right":
                right.update(outcome.kernels)
            if outcome.defect:
                defects += 1
                print(outcome.kind, outcome, flush=True)
    print(dict(counts))
    print("kernels that were right in no call:", *sorted(kernels_of_the_runtime() - set(right)))
    return int(defects > 0)


def _hunt_quantized(arguments: argparse.Namespace, end: float) -> int:
    """Compare the calls of the kernels of quantised programs; return how many show a defect of this package."""
    kernels = [kernel for kernel in quantized_kernels() if re.search(arguments.operators, kernel)]
    calls = [kernel_calls(kernel, arguments.changed) for kernel in kernels]
    calls += [[call for call in program_calls() if re.search(arguments.operators, call.name)]]
    defects = 0
    for name, found in zip([*kernels, "programs"], calls, strict=True):
        counts: Counter[str] = Counter()
        for outcome in compare(found):
            counts[outcome.kind] += 1
            if outcome.defect:
                defects += 1
                print(outcome.kind, outcome, flush=True)
            if time.monotonic() > end:
                print("time is over at", name)
                return defects
        print(name, dict(counts), flush=True)
    return defects


def _outcomes(calls: Sequence[Call], right: Counter[str]) -> Iterator[Outcome]:
    """Compare the calls of an operator: a few where the runtime has no kernels for it, or they have been seen often."""
    first = []
    for outcome in compare(calls[:_FIRST]):
        first.append(outcome)
        yield outcome
    kernels = {kernel for outcome in first for kernel in outcome.kernels}
    if kernels <= kernels_of_the_runtime() and (kernels or any("eager" in one.lowering for one in first)):
        often = bool(kernels) and all(right[kernel] > _ENOUGH for kernel in kernels)
        yield from compare(calls[_FIRST :: 8 if often else 1])


if __name__ == "__main__":
    sys.exit(main())
