"""Hunts for programs whose Edge graph by cases is another than ExecuTorch's.

    python tests/steps/casewise/hunt.py --seeds 0-1000 --kind ops|modules|random
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "support")]

import both_ways  # noqa: E402
import operator_programs  # noqa: E402
import quick_torch  # noqa: E402

from exir_lowering.steps.casewise.rewrite import MEMORY  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-100")
    parser.add_argument("--kind", choices=KINDS, default="ops")
    parser.add_argument("--way", choices=both_ways.WAYS, help="default: another one for each seed")
    parser.add_argument("--seconds", type=float, default=1e9)
    arguments = parser.parse_args()
    quick_torch.install()
    first, _, last = arguments.seeds.partition("-")
    end, counts, reasons = time.monotonic() + arguments.seconds, Counter[str](), dict[str, Counter[str]]()
    for seed in range(int(first), int(last or first) + 1):
        if time.monotonic() > end:
            print("time is over at seed", seed)
            break
        way = arguments.way or random.Random(seed * 7 + 1).choice(["xnnpack", "xnnpack", *both_ways.WAYS])
        _look(arguments.kind, seed, way, counts, reasons)
    print(dict(counts))
    for reason, names in sorted(reasons.items(), key=lambda item: -sum(item[1].values())):
        print(sum(names.values()), reason, "|", ", ".join(list(names)[:4]))


def _look(kind: str, seed: int, way: str, counts: Counter[str], reasons: dict[str, Counter[str]]) -> None:
    try:
        with both_ways.quiet():
            made = KINDS[kind].make(seed)
    except Exception as error:
        counts["not exported"] += 1
        if "-v" in sys.argv:
            print(seed, type(error).__name__, str(error)[:200])
        return
    if made is None:
        return
    name, program = made
    counts["programs"] += 1
    try:
        outcome = both_ways.compare(program, way)
    except Exception:
        print("BROKEN", kind, seed, way, name)
        traceback.print_exc()
        counts["broken"] += 1
        return
    counts["raise"] += outcome.error is not None
    counts["left"] += bool(outcome.left)
    counts["covered"] += not outcome.left and outcome.error is None
    for reason in {re.sub(r"\d+", "N", reason)[:150] for reason in outcome.left}:
        reasons.setdefault(reason, Counter())[f"{seed} {name}"] += 1
    if outcome.differences:
        counts["WRONG"] += 1
        MEMORY.forget()
        again = both_ways.compare(program, way).differences
        print(f"WRONG --kind {kind} --seeds {seed} --way {way!r}: {name}; with nothing remembered: {bool(again)}")
        for line in outcome.differences[:6]:
            print("    ", line[:400])
        sys.stdout.flush()


KINDS: dict[str, Any] = {"ops": operator_programs}

if __name__ == "__main__":
    main()
