"""Shape buckets: one dynamic program as several programs of fixed sizes, for inputs of up to these sizes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.fakes import expression
from exir_lowering._upstream.tensors import SYMBOLS
from exir_lowering.errors import InputError
from exir_lowering.fast import accelerated
from exir_lowering.graphs.copies import specialise_program
from exir_lowering.pte.manifest import BUCKET, Bucket, Crop, Size, is_element
from exir_lowering.steps.arguments import check_program
from exir_lowering.steps.conversion_context import converting
from exir_lowering.steps.dimensions import Dimensions, dynamic_sizes, user_tensors

_RETURNED = (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION)


def buckets(
    program: ExportedProgram,
    sizes: Mapping[str, Sequence[int]],
    *,
    method: str = "forward",
    pad: Mapping[str, float] | None = None,
) -> dict[str, ExportedProgram]:
    """Turn a program with dynamic dimensions into programs of fixed sizes, which `lower` makes methods of one file of.

    When `load(...).run("forward", ...)` runs the family, it takes the first method whose sizes fit: exactly those of
    the inputs or, of inputs that `pad` names, sizes that are not smaller. Those are padded, and outputs are cut.

    Args:
        program: The program, with dynamic dimensions. It is not changed; the results share its tensors.
        sizes: The sizes for each dynamic dimension, by the name of its `torch.export.Dim`, or by its input and its
            number, such as "tokens.1". Every dynamic dimension has to follow from these. Of several dimensions, there
            is a method for each combination of sizes.
        method: The name of the family.
        pad: For inputs, by name, the number that is put behind their ends. It is up to the caller that this changes
            nothing in the part of the outputs that is kept, since the model masks it, for example; `verify` with the
            dynamic program compares them. Inputs that share a dimension are padded together.

    Returns:
        The programs by name of the method, such as "forward@seq=16", smallest first.

    Raises:
        InputError: The program has no such dimension or input, a size or number is not possible, a dynamic dimension is
            not given, or an output cannot be cut after padding.
    """
    check_program("buckets", program)
    dims = _Dimensions(program)
    chosen = dims.read(sizes)
    fills = dims.read_pad({} if pad is None else pad)
    crops = dims.crops(fills) if fills else ()
    made = {}
    for combination in itertools.product(*chosen.values()):
        tags = (f"{key}={size}" for key, (_, size) in zip(chosen, combination, strict=True))
        numbers, name = dict(combination), f"{method}@{','.join(tags)}"
        try:
            made[name] = specialise_program(program, numbers)
        except RuntimeError as error:
            raise InputError(f"buckets: {name}: the program does not take these sizes: {error}") from error
        made[name].graph_module.meta[BUCKET] = Bucket(dims.describe(numbers, fills), crops)
    return dict(sorted(made.items(), key=lambda one: sum(each.numel() for _, each in user_tensors(one[1]))))


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
            if (symbol := self.find(key)) is None:
                raise InputError(f"buckets: the program has no dynamic dimension {key!r}. {self}")
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
