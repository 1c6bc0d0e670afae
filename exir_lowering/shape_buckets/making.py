"""Shape buckets: one dynamic program as several programs of fixed sizes, for inputs of up to these sizes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.fakes import expression
from exir_lowering._upstream.programs import pytree
from exir_lowering._upstream.tensors import SYMBOLS
from exir_lowering.errors import InputError
from exir_lowering.fast import accelerated
from exir_lowering.graphs.copies import specialise_program
from exir_lowering.plugins.backend import PartitionerLike
from exir_lowering.pte.manifest import BUCKET, Bucket, Crop, Size, is_element
from exir_lowering.shape_buckets.choosing import BucketChoice, list_candidates, propose
from exir_lowering.steps.arguments import check_program
from exir_lowering.steps.conversion_context import converting
from exir_lowering.steps.dimensions import Dimensions, dynamic_sizes, user_tensors
from exir_lowering.steps.limits import read_sets

_RETURNED = (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION)


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

    One dimension may be "auto". Up to twelve of its sizes in `sizes`, with the largest, are lowered and run here, which
    takes as long as lowering so many methods, and some twenty seconds. Of as many buckets, those with the least mean
    latency over `sizes` are chosen, and one bucket more while it saves 10 % of that.

    Args:
        program: The program, with dynamic dimensions. It is not changed; the results share its tensors.
        dimensions: The sizes for each dynamic dimension, or "auto", by the name of its `torch.export.Dim`, or by its
            input and its number, such as "tokens.1". Every dynamic dimension has to follow from these. Of several
            dimensions, there is a method for each combination of sizes.
        method: The name of the family.
        pad: For inputs, by name, the number that is put behind their ends. It is up to the caller that this changes
            nothing in the part of the outputs that is kept, since the model masks it, for example; `verify` with the
            dynamic program compares them. Inputs that share a dimension are padded together.
        sizes: For "auto", those that inputs have in use, such as `[{"seq": 12}, {"seq": 50}, {"seq": 50}]`, as often as
            they count. Meanwhile, other dimensions have their largest sizes.
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
    greatest = {key: max(sizes, key=lambda one: one[1]) for key, sizes in chosen.items()}
    symbol, measured = greatest[auto][0], list_candidates(given)
    tried = make({**{key: [one] for key, one in greatest.items()}, auto: [(symbol, size) for size in measured]})
    choice = propose(
        dimension=auto,
        given=given,
        tried=tried,
        dynamic={method: program},
        largest={key: size for key, (_, size) in greatest.items()},
        inputs=lambda size: dims.example({**dict(greatest.values()), symbol: size}),
        partitioners=partitioners,
        most=most,
    )
    return Buckets(make({**chosen, auto: [(symbol, one.size) for one in choice.buckets]}), choice)


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
        if len(auto) != 1:
            raise InputError(f'buckets: sizes: got {len(auto)} dimensions that are "auto", expected one. {self}')
        key, wanted = auto[0], self.symbol(auto[0])
        what = f'buckets: {key}: "auto" needs'
        padded = {self.users[place]: 0 for (place, _), each in self.places.items() if wanted in each.free_symbols}
        if sizes is None:
            raise InputError(f'{what} sizes, those of inputs in use, such as sizes=[{{"{key}": 12}}, {{"{key}": 50}}].')
        if padded.keys().isdisjoint(pad):
            why = "without it, a method takes inputs of exactly its sizes. Give it, or a list of sizes"
            raise InputError(f"{what} pad, such as pad={padded}: {why}.")
        if self.program.example_inputs is None:
            raise InputError(f"{what} the program's example inputs, which it lacks. Give a list of sizes.")
        if type(most) is not int or most < 1:
            raise InputError(f"buckets: most: got {most!r}, expected a number of buckets, an int of at least 1.")
        for number, one in enumerate(read_sets("buckets: sizes", sizes)):
            if [self.symbol(other) for other in one] != [wanted]:
                raise InputError(f'buckets: sizes[{number}]: got {one!r}, expected {key!r} alone, which is "auto".')
            counts.update(one.values())
        return key, counts

    def example(self, numbers: Mapping[Any, int]) -> list[Any]:
        """Return the example inputs in other sizes: their elements are repeated, or cut."""
        inputs = list(pytree.tree_leaves(self.program.example_inputs))
        for (key, dim), each in self.places.items():
            index = torch.arange(int(each.xreplace(numbers))) % inputs[key].shape[dim]
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
