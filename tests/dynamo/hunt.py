"""Hunts for random programs that do something else through torch.compile than in eager PyTorch.

python tests/dynamo/hunt.py --count 1000 --seed 0

Exit status 1: a program differs.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from compiled_programs import compare

NESTED = ("cond", "map", "while", "scan", "cond_in_map")


def main() -> int:
    """Hunt; return 1 if a program differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--most", type=int, default=14, help="steps in a program")
    parser.add_argument("--nested", nargs="*", default=["cond"], choices=NESTED, help="operators of every fourth")
    parser.add_argument("--seconds", type=float, default=1e9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    end = time.monotonic() + arguments.seconds
    counts: Counter[str] = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        if time.monotonic() > end:
            print("time is over at seed", seed)
            break
        nested = arguments.nested if seed % 4 == 3 else ()
        try:
            outcome = compare(seed, most=arguments.most, nested=nested, training=seed % 3 > 0)
        except Exception as error:  # whatever torch or a plug-in raises is a find
            if "modified by an inplace operation" in str(error):
                counts["not differentiated by AOTAutograd, whatever the backend"] += 1
                continue
            counts["WRONG"] += 1
            print(f"WRONG --count 1 --seed {seed}: {type(error).__name__}: {str(error)[:1000]}", flush=True)
            continue
        counts["programs"] += 1
        counts["partitions"] += outcome.partitions
        counts.update(f"fallback: {reason}" for reason in outcome.fallbacks)
    print(dict(counts))
    return int(counts["WRONG"] > 0)


if __name__ == "__main__":
    sys.exit(main())
