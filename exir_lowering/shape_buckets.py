"""Shape buckets: one dynamic program as several programs of fixed sizes, for inputs of up to these sizes."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.fakes import expression
from exir_lowering._upstream.programs import pytree
from exir_lowering._upstream.tensors import SYMBOLS
from exir_lowering.errors import BackendUnavailableError, InputError, LoweringError
from exir_lowering.fast import accelerated
from exir_lowering.graphs.copies import specialise_program
from exir_lowering.lowered import LoweredMethods
from exir_lowering.pipeline import lower
from exir_lowering.plugins.backend import PartitionerLike
from exir_lowering.pte.manifest import BUCKET, Bucket, Crop, Size, is_element
from exir_lowering.pte.printing import Shown, make_table, render
from exir_lowering.runtime.program import open_file
from exir_lowering.runtime.source import ProgramFile, read_file
from exir_lowering.steps.arguments import check_program
from exir_lowering.steps.conversion_context import converting
from exir_lowering.steps.dimensions import Dimensions, dynamic_sizes, user_tensors
from exir_lowering.steps.limits import read_sets

_RETURNED = (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION)
_CANDIDATES, _GAIN = 12, 0.1  # how many sizes are measured at most; the share of the latency that a bucket has to save
_SECONDS, _ROUNDS, _CALLS = 20.0, 10, 4  # how long it is timed, but for one round; how often at most; calls at a time


@dataclass(frozen=True, slots=True)
class BucketChoice(Shown):
    """What `buckets` chose and measured here; `print` shows it. NaN where the dynamic program cannot be lowered."""

    dimension: str
    sizes: tuple[int, ...]  # that were measured
    shares: tuple[float, ...]  # of the given sizes, from 0 to 1, that each takes; 0 if it was not chosen
    milliseconds: tuple[float, ...]  # the least of calls of each, from Python
    planned_bytes: tuple[int, ...]  # the memory that is planned for the tensors of each
    dynamic_milliseconds: tuple[float, ...]  # of the dynamic program, for the given sizes that each is the first to fit
    dynamic_planned_bytes: int  # up to the largest given size
    dynamic_mean: float  # in milliseconds over the given sizes
    best_means: tuple[float, ...]  # the same with the best bucket, the best two and so on, whether they were chosen
    bytes_per_bucket: int  # what each bucket after the first adds to the file; 0 if only one was measured

    def to_text(self, *, width: int = 100) -> str:
        """Return the table, and what the buckets cost, as plain text; `width` is that of a line, in characters."""
        shares = [f"{share:.0%}" if share else "" for share in self.shares]
        names, planned = [f"{self.dimension}={size}" for size in self.sizes], [f"{one:,}" for one in self.planned_bytes]
        ms, other = ([f"{one:.3f}" for one in times] for times in (self.milliseconds, self.dynamic_milliseconds))
        numbers = ("share", "ms", "planned bytes", "dynamic ms")
        rows = zip(names, shares, ms, planned, other, strict=True)
        best = ", ".join(f"{one:.3f}" for one in self.best_means)
        means = f"Mean ms of one bucket, two and so on: {best}; of the dynamic program: {self.dynamic_mean:.3f}."
        plans = f"The dynamic program plans {self.dynamic_planned_bytes:,} bytes."
        adds = f"Each bucket after the first adds {self.bytes_per_bucket:,} bytes to the file."
        return render([make_table(["bucket", *numbers], rows, numbers, whole=True), means, plans, adds], width)


class Buckets(dict[str, ExportedProgram]):
    """Programs of fixed sizes by method; `choice` says why these and what they cost, None if they were given."""

    def __init__(self, programs: Mapping[str, ExportedProgram], choice: BucketChoice | None = None) -> None:
        super().__init__(programs)
        self.choice = choice


def buckets(
    program: ExportedProgram,
    dimensions: Mapping[str, Sequence[int] | Literal["auto"]],
    *,
    method: str = "forward",
    pad: Mapping[str, float] | None = None,
    sizes: Sequence[Mapping[str, int]] | None = None,
    partitioners: PartitionerLike = "xnnpack",
    most: int = 4,
) -> Buckets:
    """Turn a program with dynamic dimensions into programs of fixed sizes, which `lower` makes methods of one file of.

    When `load(...).run("forward", ...)` runs the family, it takes the first method whose sizes fit: exactly those of
    the inputs or, of inputs that `pad` names, sizes that are not smaller. Those are padded, and outputs are cut.

    One dimension may be "auto": up to twelve of `sizes`, the largest among them, are lowered and run here, with the
    largest sizes of the others. This takes as long as lowering so many methods, and some twenty seconds. Of as many
    buckets, those with the least mean latency over `sizes` are chosen, and one more while it saves 10 % of that.

    Args:
        program: The program, with dynamic dimensions. It is not changed; the results share its tensors.
        dimensions: The sizes for each dynamic dimension, or "auto", by the name of its `torch.export.Dim`, or by its
            input and its number, such as "tokens.1". Every dynamic dimension has to follow from these. Of several
            dimensions, there is a method for each combination of sizes.
        method: The name of the family.
        pad: For inputs, by name, the number that is put behind their ends. It is up to the caller that this changes
            nothing in the part of the outputs that is kept, since the model masks it, for example; `verify` with the
            dynamic program compares them. Inputs that share a dimension are padded together.
        sizes: For "auto", those of inputs in use, `[{"seq": 12}, {"seq": 50}]`, repeated if they count more than once.
        partitioners: For "auto", what the methods are going to be lowered for, as for `lower`.
        most: For "auto", the greatest number of its sizes.

    Returns:
        The programs by name of the method, such as "forward@seq=16", smallest first; `.choice` has what was measured.

    Raises:
        InputError: The program has no such dimension or input, a size or number is not possible, a dynamic dimension is
            not given, or an output cannot be cut after padding; for "auto" also if `sizes` or `pad` is missing.
        LoweringError: For "auto", the methods cannot be lowered, or not run here: `BackendUnavailableError`.
    """
    check_program("buckets", program)
    dims = _Dimensions(program)
    fills = dims.read_pad({} if pad is None else pad)
    auto, given = dims.read_auto(dimensions, sizes, most, () if pad is None else pad)
    chosen = dims.read({**dimensions, auto: sorted(given)} if auto else dimensions)
    crops = dims.crops(fills) if fills else ()

    def make(sizes: Mapping[str, Sequence[tuple[Any, int]]]) -> dict[str, ExportedProgram]:
        made = {}
        for combination in itertools.product(*sizes.values()):
            tags = (f"{key}={size}" for key, (_, size) in zip(sizes, combination, strict=True))
            numbers, name = dict(combination), f"{method}@{','.join(tags)}"
            try:
                made[name] = specialise_program(program, numbers)
            except RuntimeError as error:
                raise InputError(f"buckets: {name}: the program does not take these sizes: {error}") from error
            made[name].graph_module.meta[BUCKET] = Bucket(dims.describe(numbers, fills), crops)
        return dict(sorted(made.items(), key=lambda one: sum(each.numel() for _, each in user_tensors(one[1]))))

    if not auto:
        return Buckets(make(chosen))
    largest = {key: max(sizes, key=lambda one: one[1]) for key, sizes in chosen.items()}
    symbol = largest[auto][0]
    some = {**{key: [one] for key, one in largest.items()}, auto: [(symbol, one) for one in list_candidates(given)]}
    dynamic = partial(lower, {method: program}, partitioners, sizes=[{key: size for key, (_, size) in largest.items()}])
    example = partial(dims.example, symbol, dict(largest.values()))
    choice = _propose(auto, given, lower(make(some), partitioners), dynamic, example, most)
    kept = [(symbol, size) for size, share in zip(choice.sizes, choice.shares, strict=True) if share]
    return Buckets(make({**chosen, auto: kept}), choice)


class _Dimensions(Dimensions):
    """The dynamic dimensions of a program's inputs."""

    def __init__(self, program: ExportedProgram) -> None:
        for node in graphs.user_inputs(program):
            if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat)):
                raise InputError(f"buckets: the input {node.name!r} is a number that is not fixed; export it as one.")
        super().__init__(program)

    def read(self, given: object) -> dict[str, list[tuple[Any, int]]]:
        """Return the sizes of each given dimension, with its symbol."""
        if not isinstance(given, Mapping) or not given:
            raise InputError(
                f'buckets: got {given!r}, expected sizes by dimension, such as {{"seq": [16, 64]}}. {self}'
            )
        read: dict[str, list[tuple[Any, int]]] = {}
        left = dict(self.symbols)
        for key, sizes in given.items():
            symbol = self.symbol(key)
            if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence) or not sizes:
                raise InputError(f"buckets: {key}: got {sizes!r}, expected a sequence of sizes, such as [16, 64].")
            if symbol not in left:
                raise InputError(f"buckets: {key}: the sizes of this dimension are given by another name of it.")
            del left[symbol]
            between = self.ranges.get(symbol)
            for size in sizes:
                if type(size) is not int or size < 1 or (between and not between.lower <= size <= between.upper):
                    raise InputError(f"buckets: {key}: got the size {size!r}, expected an int in its range. {self}")
            if len(set(sizes)) < len(sizes):
                raise InputError(f"buckets: {key}: got {list(sizes)}, in which a size occurs twice.")
            read[key] = [(symbol, size) for size in sizes]
        if left:
            missing = next((key for key, each in self.keys.items() if each in left), str(next(iter(left))))
            raise InputError(f"buckets: no sizes are given for {missing!r}, which stays dynamic. {self}")
        return read

    def read_auto(self, given: object, sizes: object, most: object, pad: Collection[str]) -> tuple[str, Counter[int]]:
        """Return the dimension that is "auto" and how often each of its sizes is given; "" if none is."""
        every = given.items() if isinstance(given, Mapping) else ()
        auto, counts = [key for key, one in every if isinstance(one, str) and one == "auto"], Counter[int]()
        if not auto and sizes is None:
            return "", counts
        if len(auto) != 1 or sizes is None:
            raise InputError(f'buckets: got auto={auto}, sizes={sizes!r}; expected one "auto" and sizes=[{{"n": 9}}].')
        what, wanted = f'buckets: {auto[0]}: "auto" needs', self.symbol(auto[0])
        padded = {self.users[place]: 0 for (place, _), each in self.places.items() if wanted in each.free_symbols}
        if padded.keys().isdisjoint(pad):
            raise InputError(f"{what} inputs that are padded, such as by pad={padded}; or give a list of sizes.")
        if self.program.example_inputs is None:
            raise InputError(f"{what} the program's example inputs, which it lacks; give a list of sizes.")
        if type(most) is not int or most < 1:
            raise InputError(f"buckets: most: got {most!r}, expected a number of buckets, an int of at least 1.")
        for number, one in enumerate(read_sets("buckets: sizes", sizes)):
            if [self.symbol(other) for other in one] != [wanted]:
                raise InputError(f"buckets: sizes[{number}]: got {one!r}, expected {auto[0]!r} alone.")
            counts.update(one.values())
        return auto[0], counts

    def example(self, symbol: Any, numbers: Mapping[Any, int], size: int) -> list[Any]:
        """Return the example inputs in other sizes, with one of them: their elements are repeated, or cut."""
        inputs = list(pytree.tree_leaves(self.program.example_inputs))
        for (key, dim), each in self.places.items():
            index = torch.arange(int(each.xreplace({**numbers, symbol: size}))) % inputs[key].shape[dim]
            inputs[key] = inputs[key].index_select(dim, index)
        return inputs

    def symbol(self, key: object) -> Any:
        """Return the symbol of a dimension; InputError if nothing is called so."""
        if (symbol := self.find(key)) is None:
            raise InputError(f"buckets: the program has no dynamic dimension {key!r}. {self}")
        return symbol

    def read_pad(self, given: object) -> dict[int, float]:
        """Return what each input that may be smaller is padded with, by its number."""
        if not isinstance(given, Mapping):
            raise InputError(f'buckets: pad: got {given!r}, expected numbers by input, such as {{"tokens": 0}}.')
        names = dict.fromkeys(self.users[key] for key, _ in self.places)
        for name, fill in given.items():
            if name not in names:
                known = ", ".join(map(repr, names))
                raise InputError(f"buckets: pad: {name!r} is no input with a dynamic dimension; these are {known}.")
            if not is_element(fill, dtype := self.inputs[self.users.index(name)].dtype):
                raise InputError(f"buckets: pad: {name}: got {fill!r}, expected a number that {dtype} can hold.")
        fills = {self.users.index(name): fill for name, fill in given.items()}
        padded = {symbol for (key, _), each in self.places.items() if key in fills for symbol in each.free_symbols}
        for (key, dim), each in self.places.items():
            if each.free_symbols & padded and not (key in fills and each.is_Symbol):
                name = repr(self.users[key])
                why = f"its size {each} follows from that" if key in fills else f"pad has no number for {name}"
                raise InputError(f"buckets: pad: dimension {dim} of {name} grows with a padded one, but {why}.")
        return fills

    def describe(self, numbers: Mapping[Any, Any], fills: Mapping[int, float]) -> tuple[Size, ...]:
        """Return the sizes of the inputs with these numbers."""
        first = {each: place for place, each in reversed(self.places.items())}
        sizes = []
        for place, each in self.places.items():
            size = Size(*place, int(each.xreplace(numbers)), exact=place[0] not in fills)
            if not size.exact:
                least = max(1, int(self.ranges[each].lower) if each in self.ranges else 1)
                like = first[each] if first[each] != place else None
                size = replace(size, least=least, like=like, fill=fills[place[0]])
            sizes.append(size)
        return tuple(sizes)

    def crops(self, fills: Mapping[int, float]) -> tuple[Crop, ...]:
        """Return what is cut from the outputs of the file's method, the first of which are inputs that are written."""
        with converting([self.program], gradients=True), accelerated():
            functional = self.program.run_decompositions({})
        first = {each: place for place, each in reversed(self.places.items()) if place[0] in fills}
        specs = zip(functional.graph_signature.output_specs, functional.graph.output_node().args[0], strict=True)
        crops = []
        for output, result in enumerate(each for spec, each in specs if spec.kind in _RETURNED):
            value = result.meta.get("val") if isinstance(result, Node) else None
            number = [(None, expression(value))] if isinstance(value, SYMBOLS) else []
            for dim, each in (*number, *dynamic_sizes(value)):
                if dim is not None and each in first:
                    crops.append(Crop(output, dim, *first[each]))
                elif each.free_symbols & set(first):
                    what = f"output {output}" if dim is None else f"the size of dimension {dim} of output {output}"
                    raise InputError(
                        f"buckets: pad: {what} is {each}, which would be that of the padded inputs, and cannot be cut. "
                        "Leave out pad for methods that take inputs of exactly their sizes."
                    )
        return tuple(crops)


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
    slow, last = list(itertools.accumulate(latencies, max)), len(counts) - 1

    def mean(family: Sequence[int]) -> float:
        taken = (slow[next(one for one in family if one >= index)] for index in range(last + 1))
        return sum(map(math.prod, zip(counts, taken, strict=True))) / sum(counts)

    every = ([(*some, last) for some in itertools.combinations(range(last), n)] for n in range(min(most, last + 1)))
    best = [min((mean(family), family) for family in families) for families in every]
    enough = (number for number, (one, two) in enumerate(pairwise(best)) if two[0] > (1 - _GAIN) * one[0])
    return best[next(enough, len(best) - 1)][1], tuple(cost for cost, _ in best)


def _propose(
    dimension: str,
    given: Mapping[int, int],
    lowered: LoweredMethods,
    dynamic: Callable[[], LoweredMethods],
    inputs: Callable[[int], list[Any]],
    most: int,
) -> BucketChoice:
    """Run the candidates for a dimension, and the dynamic program, and choose."""
    sizes, names, buffer = list_candidates(given), list(lowered), lowered.emit().buffer
    groups = [[size for size in sorted(given) if before < size <= last] for before, last in pairwise([0, *sizes])]
    counts = [sum(given[size] for size in group) for group in groups]  # by the candidate that is the first to fit
    alone = replace(lowered, programs={names[-1]: lowered[names[-1]]}, constant_methods={}).emit().buffer
    whole, planned = read_file(buffer, None, False), 0
    calls = [(whole, name, inputs(size), inputs(size)) for name, size in zip(names, sizes, strict=True)]
    with suppress(LoweringError):  # it may be why there are to be buckets
        file, middle = read_file(dynamic().emit().buffer, None, False), [group[len(group) // 2] for group in groups]
        ((method, spec),) = file.methods.items()
        calls += [(file, method, inputs(before), inputs(size)) for before, size in pairwise([middle[-1], *middle])]
        planned = sum(spec.arenas)
    try:
        times = _time(calls)
    except BackendUnavailableError as error:
        raise BackendUnavailableError(f'buckets: "auto" runs the methods; give a list of sizes: {error}') from error
    took, beside = tuple(times[: len(sizes)]), tuple(times[len(sizes) :] or [math.nan] * len(sizes))
    (chosen, best), shares = choose(counts, took, most), [0.0] * len(sizes)
    for before, last in pairwise([-1, *chosen]):
        shares[last] = sum(counts[before + 1 : last + 1]) / sum(counts)
    arenas = tuple(sum(whole.methods[name].arenas) for name in names)
    mean = sum(map(math.prod, zip(counts, beside, strict=True))) / sum(counts)
    more = (len(buffer) - len(alone)) // (len(sizes) - 1) if len(sizes) > 1 else 0
    return BucketChoice(dimension, tuple(sizes), tuple(shares), took, arenas, beside, planned, mean, best, more)


def _time(calls: Sequence[tuple[ProgramFile, str, list[Any], list[Any]]]) -> list[float]:
    """Return the least milliseconds of a method with the second inputs, each time behind a call with the first."""
    least, ends = [math.inf] * len(calls), time.perf_counter() + _SECONDS
    for _ in itertools.takewhile(lambda _: time.perf_counter() < ends, range(_ROUNDS)):
        for index, (file, method, before, inputs) in enumerate(calls):
            program = open_file(file, None)  # anew, since each method packs its weights
            for _ in range(_CALLS):
                program.run(method, *before)
                begun = time.perf_counter()
                program.run(method, *inputs)
                least[index] = min(least[index], (time.perf_counter() - begun) * 1e3)
    return least
