"""Hunts for programs whose Edge graph by cases is another than ExecuTorch's.

python tests/fast/hunt.py --seeds 0-1000 --kind ops|modules|random
"""

from __future__ import annotations

import argparse
import difflib
import random
import re
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch.export import ExportedProgram

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import both_ways  # noqa: E402
import module_programs  # noqa: E402
import operator_programs  # noqa: E402
import random_modules  # noqa: E402
import shrink  # noqa: E402

from exir_lowering._upstream.value_keys import MEMORY  # noqa: E402

_TOGETHER = 10
"""How many calls of operators are one program, since the time of a conversion hardly depends on it."""
_SECONDS = 240
"""How long so many programs may take."""
_SHOWN = 4
"""How many programs of each class of differences are shown."""


@dataclass
class Findings:
    """What has been found.

    Attributes:
        counts: Of programs, by outcome.
        reasons: What was left to ExecuTorch: programs by reason.
        classes: Wrong programs, by what the first difference is about.
    """

    counts: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, list[str]] = field(default_factory=dict)
    classes: Counter[str] = field(default_factory=Counter)

    def add(self, what: str, name: str, way: str, program: ExportedProgram, outcome: both_ways.Outcome) -> None:
        """Add what the comparison of a program found, and print it if it is new."""
        self.counts["programs"] += 1
        kind = "raise" if outcome.error else "left" if outcome.left else "covered"
        self.counts[kind] += 1
        for reason in {re.sub(r"\d+", "N", reason)[:200] for reason in outcome.left}:
            self.reasons.setdefault(reason, []).append(f"{what}: {name}")
        if not outcome.differences:
            return
        self.counts["WRONG"] += 1
        sort = sort_of(outcome.differences)
        self.classes[sort] += 1
        if self.classes[sort] > _SHOWN:
            return
        MEMORY.clear()
        again = bool(both_ways.compare(program, way).differences)
        print(f"WRONG {what} --way {way!r}: {name}; left: {outcome.left}; with nothing remembered: {again}")
        for line in outcome.differences[:6]:
            print("    ", line[:400])
        sys.stdout.flush()
        if self.classes[sort] <= 2:
            _print_smaller(program, way, sort)

    def print(self) -> None:
        """Print the counts, and the reasons by frequency."""
        print(dict(self.counts))
        for sort, count in self.classes.most_common():
            print("WRONG", count, sort)
        for reason, names in sorted(self.reasons.items(), key=lambda item: -len(item[1])):
            print(len(names), reason, "|", "; ".join(names[:3]))


def sort_of(differences: Sequence[str]) -> str:
    """Return what differences are about, without what only one program has."""
    return " ".join(
        sorted({re.sub(r"node \d+ [^:]*|\d+", "N", line.partition(" / ")[0])[:30] for line in differences[:3]})
    )


def hunt_operators(seeds: Sequence[int], way: str | None, found: Findings) -> None:
    """Compare programs of several operators; those that differ or raise, operator by operator."""
    calls = {}
    for seed in seeds:
        try:
            with both_ways.quiet():
                made = operator_programs.call(seed)
        except Exception:
            continue
        if made is not None:
            calls[seed] = made
    way = way or random.Random(seeds[0]).choice([way for way in both_ways.WAYS if way.rpartition(" ")[2] in _LENIENT])
    quiet = [seed for seed in calls if not calls[seed].writes]
    for group in (quiet, *([seed] for seed in calls if calls[seed].writes)):
        _compare_operators({seed: calls[seed] for seed in group}, way, found)


_LENIENT = ("unchecked", "order", "preserving")


def _compare_operators(calls: dict[int, operator_programs.Call], way: str, found: Findings) -> None:
    if not calls:
        return
    outcome = None
    try:
        with both_ways.quiet():
            program = operator_programs.export_calls(list(calls.values()))
    except Exception:
        found.counts["not exported"] += len(calls) == 1
    else:
        what = f"--kind ops --seeds {'-'.join(map(str, calls)) if len(calls) == 1 else f'{min(calls)}..{max(calls)}'}"
        outcome = _compare(program, way, what, found)
        bad = outcome is not None and (outcome.differences or outcome.left or outcome.error)
        if outcome is not None and (not bad or len(calls) == 1):
            found.add(what, ", ".join(one.name for one in calls.values())[:100], way, program, outcome)
            found.counts["calls"] += len(calls)
            return
    if len(calls) > 1:
        seeds = list(calls)
        for half in (seeds[: len(seeds) // 2], seeds[len(seeds) // 2 :]):
            _compare_operators({seed: calls[seed] for seed in half}, way, found)


def _compare(program: ExportedProgram, way: str, what: str, found: Findings) -> both_ways.Outcome | None:
    try:
        return both_ways.compare(program, way)
    except Exception:
        print("BROKEN", what, "--way", repr(way))
        traceback.print_exc(file=sys.stdout)
        found.counts["BROKEN"] += 1
        return None


def hunt_programs(kind: str, seeds: Sequence[int], way: str | None, found: Findings) -> None:
    """Compare modules or random programs."""
    for seed in seeds:
        try:
            with both_ways.quiet():
                name, program = {"random": random_modules, "modules": module_programs}[kind].make(seed)
        except Exception as error:
            found.counts[f"not exported: {type(error).__name__}"] += 1
            continue
        this = way or random.Random(seed * 7 + 1).choice(["xnnpack", "none", *both_ways.WAYS])
        what = f"--kind {kind} --seeds {seed}"
        outcome = _compare(program, this, what, found)
        if outcome is not None:
            found.add(what, name, this, program, outcome)


def _print_smaller(program: ExportedProgram, way: str, sort: str) -> None:
    small = shrink.shrink(program, lambda one: sort_of(both_ways.compare(one, way).differences) == sort)
    shown = [line for line in str(small.graph).splitlines()[1:] if "num_users=0] = placeholder" not in line]
    print("    smaller:", *(line.strip().replace("torch.ops.", "") for line in shown), sep="\n      ")
    for line in both_ways.compare(small, way).differences[:6]:
        print("    ", line[:300])
    if sort.startswith("errors"):
        return
    operators = [
        [
            f"{node.target}{node.args}"
            for node in both_ways.convert(small, way, fast)[0].graph.nodes
            if node.op != "placeholder"
        ]
        for fast in (False, True)
    ]
    print(
        *("     " + line.rstrip()[:200] for line in difflib.unified_diff(*operators, "executorch", "fast", n=1)),
        sep="\n",
    )
    sys.stdout.flush()


class TookTooLong(BaseException):
    """Some programs end too late."""


def _too_long(*_: object) -> None:
    raise TookTooLong


def main() -> int:
    """Hunt; return 1 if a program differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-100")
    parser.add_argument("--kind", choices=("ops", "modules", "random"), default="ops")
    parser.add_argument("--way", choices=both_ways.WAYS, help="default: another one for each seed")
    parser.add_argument("--only", type=int, nargs="*", help="these seeds instead")
    parser.add_argument("--seconds", type=float, default=1e9)
    arguments = parser.parse_args()
    signal.signal(signal.SIGALRM, _too_long)
    first, _, last = arguments.seeds.partition("-")
    seeds = arguments.only or range(int(first), int(last or first) + 1)
    end, found = time.monotonic() + arguments.seconds, Findings()
    hunt = hunt_operators if arguments.kind == "ops" else partial(hunt_programs, arguments.kind)
    for start in range(0, len(seeds), _TOGETHER):
        if time.monotonic() > end:
            print("time is over at seed", seeds[start])
            break
        signal.alarm(_SECONDS)
        try:
            hunt(seeds[start : start + _TOGETHER], arguments.way, found)
        except TookTooLong:
            found.counts["took too long"] += 1
        signal.alarm(0)
    found.print()
    return int(found.counts["WRONG"] > 0)


if __name__ == "__main__":
    sys.exit(main())
