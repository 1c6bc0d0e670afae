"""Which sizes buckets get: the rule, what it is measured by, and what the choice costs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from itertools import accumulate, combinations, pairwise
from typing import Any

from torch.export import ExportedProgram

from exir_lowering.errors import LoweringError
from exir_lowering.pipeline import lower
from exir_lowering.plugins.backend import PartitionerLike
from exir_lowering.pte.printing import Shown, make_table, render
from exir_lowering.runtime.program import open_file
from exir_lowering.runtime.source import ProgramFile, read_file

_CANDIDATES, _GAIN = 12, 0.1  # how many sizes are measured at most; the share of the latency that a bucket has to save
_SECONDS, _ROUNDS, _CALLS = 20.0, 3, 20  # how long all calls take, about; how often each is timed, by how many at most


@dataclass(frozen=True, slots=True)
class ChosenBucket:
    """A bucket that was chosen."""

    size: int  # of the dimension
    share: float  # of the given sizes, from 0 to 1, that it takes
    milliseconds: float  # of a call
    dynamic_milliseconds: float  # of the dynamic program, on average over the given sizes that the bucket takes
    planned_bytes: int  # the memory that is planned for its tensors


@dataclass(frozen=True, slots=True)
class BucketChoice(Shown):
    """The sizes that `buckets` chose, smallest first, and what they cost; `print` shows it as a table.

    Times are those of calls from Python on this machine, NaN where the dynamic program cannot be lowered.
    """

    dimension: str
    buckets: tuple[ChosenBucket, ...]
    milliseconds: float  # on average over the given sizes
    dynamic_milliseconds: float  # of the dynamic program, on average over the given sizes
    dynamic_planned_bytes: int  # what the dynamic program plans for the largest given size
    best_milliseconds: tuple[float, ...]  # on average, with the best one bucket, the best two and so on
    bytes_per_bucket: int  # what each bucket after the first adds to the file; 0 if only one was measured

    def to_text(self, *, width: int = 100) -> str:
        """Return the table, and what the buckets cost, as plain text; `width` is that of a line, in characters."""
        numbers = ("share", "ms", "dynamic ms", "planned bytes")
        every = [(f"{self.dimension}={one.size}", *astuple(one)[1:]) for one in self.buckets]
        every.append(("all", 1.0, self.milliseconds, self.dynamic_milliseconds, self.dynamic_planned_bytes))
        rows = [
            (name, f"{of:.0%}", f"{ms:.3f}", f"{alone:.3f}", f"{planned:,}") for name, of, ms, alone, planned in every
        ]
        best = ", ".join(f"{ms:.3f}" for ms in self.best_milliseconds)
        costs = f"The last number is that of the dynamic program. Best by number of buckets: {best} ms."
        more = f"Each bucket after the first adds {self.bytes_per_bucket:,} bytes to the file."
        return render([make_table(("bucket", *numbers), rows, numbers, whole=True), costs, more], width)


def list_candidates(given: Mapping[int, int]) -> list[int]:
    """Return the sizes to measure, by how often each is given: all, or those that stand for equal parts of all work."""
    found, total, done = list[int](), sum(size * count for size, count in given.items()), 0
    for size in sorted(given):
        done += size * given[size]
        if len(given) <= _CANDIDATES or done * _CANDIDATES >= total * (len(found) + 1):
            found.append(size)
    return found


def choose(counts: Sequence[int], latencies: Sequence[float], most: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the candidates to take, and the mean latency of the best one, the best two and so on.

    One more is taken while it saves a tenth. `counts` says how many given sizes each candidate is the first to fit,
    smallest candidate first; each counts as slow as the slowest before it.
    """
    slow, last = list(accumulate(latencies, max)), len(counts) - 1

    def mean(family: Sequence[int]) -> float:
        parts = pairwise([-1, *family])
        return sum(slow[end] * sum(counts[before + 1 : end + 1]) for before, end in parts) / sum(counts)

    every = [[(*some, last) for some in combinations(range(last), more)] for more in range(min(most, last + 1))]
    best = [min((mean(family), family) for family in families) for families in every]
    enough = (number for number, (one, two) in enumerate(pairwise(best)) if two[0] > (1 - _GAIN) * one[0])
    return best[next(enough, len(best) - 1)][1], tuple(cost for cost, _ in best)


def propose(
    dimension: str,
    given: Mapping[int, int],
    tried: Mapping[str, ExportedProgram],
    dynamic: Mapping[str, ExportedProgram],
    largest: Mapping[str, int],
    inputs: Callable[[int], list[Any]],
    partitioners: PartitionerLike,
    most: int,
) -> BucketChoice:
    """Lower and run the candidates for a dimension, and the dynamic program up to its largest sizes, and choose."""
    sizes, names, lowered = list_candidates(given), list(tried), lower(tried, partitioners)
    groups = [[size for size in sorted(given) if before < size <= last] for before, last in pairwise([0, *sizes])]
    counts = [sum(given[size] for size in group) for group in groups]  # by the candidate that is the first to fit
    whole = lowered.emit().buffer
    alone = replace(lowered, programs={names[-1]: lowered[names[-1]]}, constant_methods={}).emit().buffer
    file, (method,), planned = read_file(whole, None, False), dynamic, 0
    calls: list[_Call] = [(file, name, inputs(size), inputs(size)) for name, size in zip(names, sizes, strict=True)]
    with suppress(LoweringError):  # it may be why there are to be buckets
        other = read_file(lower(dynamic, partitioners, sizes=[largest]).emit().buffer, None, False)
        planned, middle = sum(other.methods[method].arenas), [group[len(group) // 2] for group in groups]
        calls += [(other, method, inputs(before), inputs(size)) for before, size in pairwise([middle[-1], *middle])]
    times = _time(calls)
    took, on_dynamic = times[: len(sizes)], times[len(sizes) :] or [math.nan] * len(sizes)
    spent = [count * ms for count, ms in zip(counts, on_dynamic, strict=True)]
    chosen, best = choose(counts, took, most)
    buckets = []
    for first, end in pairwise([0, *(number + 1 for number in chosen)]):
        count, arenas = sum(counts[first:end]), file.methods[names[end - 1]].arenas
        ms = max(took[:end]), sum(spent[first:end]) / count
        buckets.append(ChosenBucket(sizes[end - 1], count / sum(counts), *ms, sum(arenas)))
    more = (len(whole) - len(alone)) // max(1, len(sizes) - 1)
    means = best[len(chosen) - 1], sum(spent) / sum(counts)
    return BucketChoice(dimension, tuple(buckets), *means, planned, best, more)


_Call = tuple[ProgramFile, str, Sequence[Any], Sequence[Any]]
"""A method, the inputs of a call that is not timed, and those of the one behind it: in use, sizes change."""


def _time(calls: Sequence[_Call]) -> list[float]:
    """Return the milliseconds of each call: the median of a round, and of all rounds the least."""
    least, seconds = [math.inf] * len(calls), _SECONDS / _ROUNDS / len(calls)
    for _ in range(_ROUNDS):  # what else the machine does meanwhile falls on all of them
        for index, (file, method, before, inputs) in enumerate(calls):
            program, times = open_file(file, None), list[float]()  # for each anew: methods pack weights of their own
            ends = time.perf_counter() + seconds
            while not times or (len(times) < _CALLS and time.perf_counter() < ends):
                program.run(method, *before)
                begun = time.perf_counter()
                program.run(method, *inputs)
                times.append((time.perf_counter() - begun) * 1e3)
            least[index] = min(least[index], statistics.median(times))
    return least
