"""Shape buckets: one dynamic program as several programs of fixed sizes, for inputs of up to these sizes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, SymIntArgument
from torch.fx import Graph, GraphModule, Node, map_arg

from exir_lowering import graphs
from exir_lowering._upstream import locks
from exir_lowering._upstream.acceleration import accelerating
from exir_lowering._upstream.fakes import FakeCopies, expression, names_of_symbols, shape_env_of, smallest
from exir_lowering._upstream.likeness import SYMBOLS
from exir_lowering._upstream.programs import lazy_graph_module, pytree
from exir_lowering.errors import InputError
from exir_lowering.graphs.ranges.padding import Kept, Mixing, follow
from exir_lowering.pte.manifest import BUCKET, Bucket, Crop, Size
from exir_lowering.steps.arguments import check_program
from exir_lowering.steps.conversion_context import converting


def buckets(
    program: ExportedProgram,
    sizes: Mapping[str, Sequence[int]],
    *,
    method: str = "forward",
    exact: bool = False,
    assume: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, ExportedProgram]:
    """Turn a program with dynamic dimensions into programs of fixed sizes, which `lower` makes methods of one file of.

    When `load(...).run("forward", ...)` runs the family, it takes the first method whose sizes are not smaller than the
    input's, pads the input with zeros behind its end, and cuts the outputs. So padding has to be without effect on what
    is kept, which is proven here.

    Args:
        program: The program, with dynamic dimensions. It is not changed; the results share its tensors.
        sizes: The sizes for each dynamic dimension, by the name of its `torch.export.Dim`, or by its input and its
            number, such as "tokens.1". Every dynamic dimension has to follow from these. Of several dimensions, there
            is a method for each combination of sizes.
        method: The name of the family.
        exact: Whether methods take inputs of exactly their sizes, so that nothing is padded and nothing has to be
            proven.
        assume: What holds for every input, where the proof needs it, as `LoweringOptions.assume`.

    Returns:
        The programs by name of the method, such as "forward@seq=16", smallest first.

    Raises:
        InputError: The program has no such dimension, a size is not possible, a dynamic dimension is not given; or
            padding may change a result: the message names the operator that mixes positions, and its source line.
    """
    check_program("buckets", program)
    dims = _Dimensions(program)
    chosen = dims.read(sizes)
    with locks.conversion(), converting([program], gradients=True), accelerating():
        kept = None if exact else follow(program, frozenset(dims.symbols), assume)
    if isinstance(kept, Mixing):
        raise InputError(
            f"buckets: padding may change what is kept: {kept.reason}.\n{graphs.source_code(kept.node)}\n"
            f"{kept.advice}Give exact=True for methods that take inputs of exactly their sizes."
        )
    made = {}
    for combination in itertools.product(*chosen.values()):
        tags = (f"{key}={size}" for key, (_, size) in zip(chosen, combination, strict=True))
        numbers, name = dict(combination), f"{method}@{','.join(tags)}"
        made[name] = _Specialisation(program, numbers, name).program()
        made[name].graph_module.meta[BUCKET] = dims.describe(numbers, kept)
    return dict(sorted(made.items(), key=lambda one: sum(each.numel() for _, each in _user_tensors(one[1]))))


def _user_tensors(program: ExportedProgram) -> list[tuple[Node, torch.Tensor]]:
    """Return the inputs that the user passes as tensors, and their fake values; the order is that of the file."""
    values = ((node, node.meta.get("val")) for node in graphs.user_inputs(program))
    return [(node, value) for node, value in values if isinstance(value, torch.Tensor)]


class _Dimensions:
    """The dynamic dimensions of a program's inputs."""

    def __init__(self, program: ExportedProgram) -> None:
        self._ranges = program.range_constraints
        users = [str(name) for name in program.graph_signature.user_inputs]
        self._places: dict[tuple[int, int], Any] = {}  # the expression of each dimension, by input and number
        self._keys: dict[str, Any] = {}
        environment = None
        for node, value in _user_tensors(program):
            environment = environment or shape_env_of(value)
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    self._places[users.index(node.name), dim] = each = expression(size)
                    if each.is_Symbol:
                        self._keys[f"{node.name}.{dim}"] = each
        self.symbols = {symbol: None for each in self._places.values() for symbol in each.free_symbols}
        named = names_of_symbols(environment) if environment is not None else {}
        self.names = {name: symbol for name, symbol in named.items() if symbol in self.symbols}
        self._keys.update(self.names)
        for node in program.graph.find_nodes(op="placeholder"):
            if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat)):
                raise InputError(f"buckets: the input {node.name!r} is a number that is not fixed; export it as one.")

    def __str__(self) -> str:
        listed = []
        for symbol in self.symbols:
            keys = [repr(key) for key in (*self.names, *self._keys) if self._keys[key] == symbol]
            between = self._ranges.get(symbol)
            size = "any size" if between is None else f"{between.lower} to {between.upper}"
            listed.append(f"{', '.join(dict.fromkeys(keys))} ({size})")
        return f"The dynamic dimensions are {'; '.join(listed)}." if listed else "No dimension of it is dynamic."

    def read(self, given: object) -> dict[str, list[tuple[Any, int]]]:
        """Return the sizes of each given dimension, with its symbol."""
        if not isinstance(given, Mapping) or not given:
            raise InputError(
                f'buckets: got {given!r}, expected sizes by dimension, such as {{"seq": [16, 64]}}. {self}'
            )
        read: dict[str, list[tuple[Any, int]]] = {}
        left = dict(self.symbols)
        for key, sizes in given.items():
            if not self.names and len(self.symbols) == 1 and str(key).isidentifier():
                self._keys[key] = next(iter(self.symbols))  # a program of a file has no names
            if key not in self._keys:
                raise InputError(f"buckets: the program has no dynamic dimension {key!r}. {self}")
            if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence) or not sizes:
                raise InputError(f"buckets: {key}: got {sizes!r}, expected a sequence of sizes, such as [16, 64].")
            if len(set(map(repr, sizes))) < len(sizes):
                raise InputError(f"buckets: {key}: got {list(sizes)}, in which a size occurs twice.")
            if self._keys[key] not in left:
                raise InputError(f"buckets: {key}: the sizes of this dimension are given by another name of it.")
            symbol = self._keys[key]
            del left[symbol]
            read[key] = [(symbol, self._check(key, symbol, size)) for size in sizes]
        if left:
            missing = next((key for key, each in self._keys.items() if each in left), str(next(iter(left))))
            raise InputError(f"buckets: no sizes are given for {missing!r}, which stays dynamic. {self}")
        return read

    def _check(self, key: str, symbol: Any, size: object) -> int:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InputError(f"buckets: {key}: got the size {size!r}, expected an int of at least 1.")
        between = self._ranges.get(symbol)
        if between is not None and not between.lower <= size <= between.upper:
            raise InputError(f"buckets: {key}: got {size}, outside the program's range. {self}")
        return size

    def describe(self, numbers: Mapping[Any, Any], kept: Kept | None) -> Bucket:
        """Return the bucket of these numbers; without what is kept, one that takes its own sizes only."""
        first = {each: place for place, each in reversed(self._places.items())}
        sizes = []
        for place, each in self._places.items():
            size = Size(*place, int(each.xreplace(numbers)), exact=kept is None)
            if kept is not None:
                if not each.is_Symbol:
                    raise InputError(
                        f"buckets: an input has the size {each}, which follows from others. Give exact=True."
                    )
                least, like = smallest(each, self._ranges), first[each] if first[each] != place else None
                size = replace(size, least=least, like=like)
            sizes.append(size)
        crops = []
        for output, shape in enumerate(kept or ()):
            for dim, each in shape.items():
                if each not in first:
                    raise InputError(
                        f"buckets: dimension {dim} of output {output} has the size {each}, which is no input's: it "
                        "cannot be cut after padding. Give exact=True."
                    )
                crops.append(Crop(output, dim, *first[each]))
        return Bucket(tuple(sizes), tuple(crops))


class _Specialisation:
    """A copy of a program with numbers in the place of symbols."""

    def __init__(self, program: ExportedProgram, numbers: Mapping[Any, Any], name: str) -> None:
        self._program, self._numbers, self._name = program, numbers, name
        users = _user_tensors(program)
        self._fakes = FakeCopies(numbers, shape_env_of(users[0][1]))

    def program(self) -> ExportedProgram:
        program = self._program
        module, _ = self._graph(program.graph_module, nested=False)
        results: Any = module.graph.output_node().args[0]
        copied = graphs.copy_program(program, module)
        copied.example_inputs = None  # they have other sizes
        specs = copied.graph_signature.output_specs
        for index, (spec, result) in enumerate(zip(specs, results, strict=True)):
            if isinstance(spec.arg, SymIntArgument) and not isinstance(result, Node):
                specs[index] = replace(spec, arg=ConstantArgument(name=spec.arg.name, value=result))
        for each in program.range_constraints:
            if each.free_symbols & set(self._numbers):
                del copied.range_constraints[each]
        return copied

    def _graph(self, module: GraphModule, *, nested: bool) -> tuple[GraphModule, list[bool]]:
        """Copy a graph, and say which of its inputs are left: numbers need no input any more in a nested one."""
        graph, root = Graph(), dict[str, Any]()
        env: dict[Node, Any] = {}
        left: list[bool] = []
        operands: dict[Node, list[bool]] = {}  # of a nested graph
        for node in module.graph.nodes:
            before = node.meta.get("val")
            value = pytree.tree_map(self._fakes.copy, before)
            symbolic = isinstance(before, SYMBOLS)
            number = symbolic and value is not before and isinstance(value, (int, float))
            if node.op == "placeholder" and nested:
                left.append(not number)
            if number:
                env[node] = value
                continue
            if node.op == "call_function" and value is None and self._holds(node, env):
                continue
            if node.op == "get_attr":
                inner = graphs.attribute(module, node.target)
                if isinstance(inner, GraphModule):
                    inner, operands[node] = self._graph(inner, nested=True)
                root[str(node.target)] = inner
            if node.op == "output":
                copied = graph.output(map_arg(node.args[0], env.__getitem__))
                copied.meta.update(node.meta)
            else:
                env[node] = copied = graph.node_copy(node, env.__getitem__)
            if before is not None:
                copied.meta["val"] = value
            _drop(copied, next((operands[each] for each in node.args if each in operands), None))
        copied_module = lazy_graph_module(root, graph)
        copied_module.meta.update(module.meta)
        return copied_module, left

    def _holds(self, node: Node, env: Mapping[Node, Any]) -> bool:
        """Return whether a check is of numbers only, and holds."""
        if not node.all_input_nodes or any(isinstance(env[each], Node) for each in node.all_input_nodes):
            return False
        args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
        try:
            node.target(*args, **kwargs)  # type: ignore[operator]
        except RuntimeError as error:
            raise InputError(f"buckets: {self._name}: the program does not take these sizes: {error}") from error
        return True


def _drop(node: Node, left: Sequence[bool] | None) -> None:
    """Take the operands that are numbers now from a call of nested graphs; they are what comes behind the graphs."""
    if left is None:
        return
    last = max(i for i, each in enumerate(node.args) if isinstance(each, Node) and each.op == "get_attr")
    keep = iter(left)
    args: list[Any] = list(node.args[: last + 1])
    for each in node.args[last + 1 :]:
        if isinstance(each, (tuple, list)):
            args.append(type(each)(one for one in each if next(keep)))
        elif next(keep):
            args.append(each)
    node.args = tuple(args)
