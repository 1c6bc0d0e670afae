"""Compiles graphs of AOTAutograd, and what has to be compiled again: for other weights, or for other sizes."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule

from exir_lowering._upstream.dynamo import TorchDynamoException, boxed, eager, is_compiling, outside_tracing
from exir_lowering._upstream.fakes import FakeTensor, size_hint
from exir_lowering._upstream.programs import pytree
from exir_lowering._upstream.tensors import SYMBOLS, version
from exir_lowering.dynamo.capture import capture
from exir_lowering.dynamo.compiled import Boxed
from exir_lowering.dynamo.logs import Kind, Log, NotLowered, UnboundedSizes
from exir_lowering.dynamo.lowering import compile_graphs
from exir_lowering.dynamo.options import Attempt, Check
from exir_lowering.dynamo.partitioning import takes_any
from exir_lowering.errors import BackendFailure, LoweringError, exception_text, explained
from exir_lowering.graphs.checksums import checksum
from exir_lowering.graphs.copies import specialise
from exir_lowering.plans.report import Report

Modules = Mapping[str, GraphModule]  # graphs that are compiled together, by method

Weights = Mapping[int, torch.Tensor]
"""The weights that may be baked into the first graph, by the number of the input that each is."""


class GraphCompiler:
    """Compiles graphs in one attempt: each is captured, lowered and made callable."""

    def __init__(self, attempt: Attempt, log: Log) -> None:
        self._attempt, self._log = attempt, log

    def compile(self, kind: Kind, modules: Modules, weights: Weights) -> dict[str, Boxed]:
        """Compile graphs together, whose first has this kind and weights; NotLowered, or LoweringError as `lower`."""
        with outside_tracing():
            first, module = next(iter(modules.items()))
            try:
                compiled, marks, report = self._lower(kind, modules, weights)
                if self._attempt.must_take and not (report and takes_any(report.methods)):
                    raise NotLowered("it took no operator")
            except (UnboundedSizes, BackendFailure):
                if len(modules) > 1 or not has_symbolic_sizes(module):
                    raise
                compiled, marks = {}, None
            functions = dict(compiled) or {first: self._specialize(kind, first, module, weights)}
            if marks is not None:
                functions[first] = self._watch(kind, first, module, marks, functions[first])
            return {name: _also_for_fakes(function, modules[name]) for name, function in functions.items()}

    def _lower(
        self, kind: Kind, modules: Modules, weights: Weights
    ) -> tuple[Mapping[str, Boxed], list[Mark] | None, Report | None]:
        """Capture graphs, and lower them together; return also what the weights were if they are constants now."""
        with _foreseen():
            first, *_ = modules
            captured = [capture(name, module, weights if name == first else {}) for name, module in modules.items()]
            placeholders = [node for node in captured[0].module.graph.nodes if node.op == "placeholder"]
            positions = [placeholders.index(node) for node in captured[0].baked.values()]
            how = self._attempt.options.check_weights
            marks = [Mark(position, weights[position], how) for position in positions]
            functions, report, baked = compile_graphs(kind, captured, self._attempt)
        if report is not None:
            self._log.add(kind, report)
        return functions, marks if baked else None, report

    def _watch(self, kind: Kind, name: str, module: GraphModule, marks: Sequence[Mark], function: Boxed) -> Boxed:
        """Return a function that is compiled again when a weight has changed; PyTorch runs it if that fails."""
        positions = [each.position for each in marks]

        def again(args: Sequence[Any] | None) -> tuple[Sequence[Mark], Boxed]:
            weights = {} if args is None else {position: args[position] for position in positions}
            if args is None:
                often = NotLowered("their values change too often")
                self._log.note("weights as constants", kind, often, "the same graph with weights as inputs", warn=False)
            try:
                with outside_tracing():
                    functions, found, _ = self._lower(kind, {name: module}, weights)
                return found or (), functions[name]
            except (NotLowered, LoweringError) as error:
                self._log.note("weights that have changed", kind, error, "eager")
                return (), eager(module)

        return boxed(Watched(marks, function, again))

    def _specialize(self, kind: Kind, name: str, module: GraphModule, weights: Weights) -> Boxed:
        """Return a function that is compiled for the sizes that it gets; PyTorch runs it where that fails later."""
        positions = tuple(weights)  # the weights themselves may be replaced

        def compile_for(args: Sequence[Any], first: bool) -> Boxed:
            now = {position: args[position] for position in positions}
            try:
                with _foreseen():
                    static = specialize(module, args)
                return self.compile(kind, {name: static}, now)[name]
            except (NotLowered, LoweringError) as error:
                if first:
                    raise
                self._log.note("other sizes", kind, error, "eager")
                return eager(module)

        return boxed(Specialized(module, compile_for, weights))


def _foreseen() -> AbstractContextManager[None]:
    """Raise NotLowered for an exception that nobody has foreseen: PyTorch can still run the graph."""
    passing = (NotLowered, LoweringError, TorchDynamoException)
    return explained(lambda error: NotLowered(f"{exception_text(error)}. Please report this function"), *passing)


def _also_for_fakes(function: Boxed, module: GraphModule) -> Boxed:
    """Return a boxed function that PyTorch runs where it is called with fake tensors, while more is compiled."""
    # So are the parts into which DistributedDataParallel divides a function: each shows what the next one gets.
    in_pytorch = eager(module)

    def run(args: list[Any]) -> Any:
        if is_compiling() and any(isinstance(value, FakeTensor) for value in args):
            return in_pytorch(args)
        return function(args)

    return boxed(run)


_SMALL = 1 << 16  # bytes up to which the whole content is compared with a copy, which is faster than a checksum

_WHOLE, _SAMPLED = 4096, 16
"""Bytes up to which a sample is the whole content, and how many words of 8 bytes it has beyond, over the weight."""

_WORTH = 100  # calls between two changes of weights for which it is worth to compile again, but for the first change


class Mark:
    """What a weight, an input of a graph, was when it was packed; its memory is kept as long as the weight is."""

    def __init__(self, position: int, weight: torch.Tensor, how: Check) -> None:
        own = weight.detach()
        self.position, self._address, self._version = position, own.data_ptr(), version(own)
        self._shape, self._stride = own.shape, own.stride()
        held: list[Any] = [own, None if how == "frozen" else _comparison(own, whole=how == "content")]
        self._held = held  # the memory, and what compares its content; None if it may be written
        self._lives = weakref.ref(weight, lambda _: held.clear())

    def holds(self, args: Sequence[Any]) -> bool:
        """Return whether the inputs of a call have the weight as it was."""
        given, held = args[self.position], tuple(self._held)
        if not held or given.data_ptr() != self._address:
            return False
        if given.shape != self._shape or given.stride() != self._stride:
            return False
        unchanged = held[1]
        return unchanged is None or (version(given) == self._version and unchanged())


def _comparison(weight: torch.Tensor, *, whole: bool) -> Callable[[], bool]:
    """Return what compares a weight's content with what it is now; writes by other libraries are not counted."""
    storage = weight.untyped_storage()
    if whole and weight.nbytes <= _SMALL and weight.is_contiguous():
        memory = weight.reshape(-1).view(torch.uint8)
        copy = memory.clone()
        return lambda: torch.equal(memory, copy)
    if whole:
        known = checksum(storage)
        return lambda: checksum(storage) == known
    sample = _sample(weight)
    content = sample.tobytes()
    return lambda: sample.tobytes() == content


def _sample(weight: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a view of some of a weight's memory, in steps that no row of a matrix is likely to have."""
    memory = torch.empty(0, dtype=torch.uint8).set_(weight.untyped_storage()).numpy()
    if weight.is_contiguous():
        start = weight.storage_offset() * weight.element_size()
        memory = memory[start : start + weight.nbytes]
    if len(memory) <= _WHOLE:
        return memory
    count = len(memory) // 8
    return memory[: 8 * count].view(np.int64)[:: (count // _SAMPLED) | 1]


class Watched:
    """A function with weights as constants, compiled again when one has changed; if that is often, with inputs."""

    def __init__(
        self,
        marks: Sequence[Mark],
        function: Boxed,
        again: Callable[[Sequence[Any] | None], tuple[Sequence[Mark], Boxed]],  # None: weights as inputs
    ) -> None:
        self._current: tuple[Sequence[Mark], Boxed] = (tuple(marks), function)
        self._again = again
        self._served = 0
        self._changed = False
        self._lock = threading.RLock()

    def __call__(self, args: list[Any]) -> Any:
        """Execute the function, with the weights as they are now."""
        marks, function = self._current
        for each in marks:
            if not each.holds(args):
                function = self._renew(args)
                break
        self._served += 1
        return function(args)

    def _renew(self, args: Sequence[Any]) -> Boxed:
        with self._lock:
            if not all(each.holds(args) for each in self._current[0]):  # unless another thread has done it
                worth = _WORTH if self._changed else 2
                self._current = self._again(args if self._served >= worth else None)
                self._served, self._changed = 0, True
            return self._current[1]


MOST = 16  # for how many sets of sizes a graph is kept; the one that was not used for the longest time goes


class Specialized:
    """A function that is compiled for each set of sizes of its inputs when it occurs; its backend has to know them."""

    def __init__(
        self,
        module: GraphModule,
        compile_for: Callable[[Sequence[Any], bool], Boxed],  # the second argument: whether it is the first time
        weights: Mapping[int, torch.Tensor],  # by the numbers of the inputs
    ) -> None:
        self._compile = compile_for
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._symbolic = [position for position, node in enumerate(placeholders) if _is_symbolic(node.meta.get("val"))]
        self._known: OrderedDict[tuple[Any, ...], Boxed] = OrderedDict()
        self._lock = threading.RLock()
        # Compiled for the sizes with which the graph was traced at once, what cannot be compiled shows now.
        traced = [weights.get(number, _example(node.meta.get("val"))) for number, node in enumerate(placeholders)]
        self._add(self._key(traced), traced)

    def __call__(self, args: list[Any]) -> Any:
        """Execute the graph, compiled for the sizes of these inputs."""
        key = self._key(args)
        function = self._known.get(key)
        if function is None:
            return self._add(key, args)(args)
        with suppress(KeyError):  # another thread may have let it go
            self._known.move_to_end(key)
        return function(args)

    def _key(self, args: Sequence[Any]) -> tuple[Any, ...]:
        given = (args[position] for position in self._symbolic)
        return tuple((tuple(v.shape), v.stride()) if isinstance(v, torch.Tensor) else v for v in given)

    def _add(self, key: tuple[Any, ...], args: Sequence[Any]) -> Boxed:
        with self._lock:
            if key not in self._known:
                self._known[key] = self._compile(args, not self._known)
            self._known.move_to_end(key)
            while len(self._known) > MOST:
                self._known.popitem(last=False)
            return self._known[key]


def specialize(module: GraphModule, args: Sequence[Any]) -> GraphModule:
    """Return a graph with the sizes of some inputs; numbers have placeholders too, and are constants in it."""
    numbers: dict[Any, Any] = {}
    layouts: list[tuple[Any, Any]] = []  # strides and offsets: of a dimension of size 1, a stride may be any number
    shape_env = None
    for node, given in zip(module.graph.find_nodes(op="placeholder"), args, strict=True):
        sizes = given.dim() if isinstance(given, torch.Tensor) else 1
        for place, (size, number) in enumerate(zip(_numbers(node.meta.get("val")), _numbers(given), strict=True)):
            if isinstance(size, SYMBOLS):
                shape_env = size.node.shape_env
                if place < sizes:
                    numbers[size.node.expr] = number
                else:
                    layouts.append((size.node.expr, number))
    known = {expression for expression in numbers if expression.is_Symbol}
    for expression, number in layouts:
        if not expression.free_symbols <= known:
            numbers.setdefault(expression, number)
    of_inputs = {symbol for known in numbers for symbol in known.free_symbols}
    for size in _symbolic(module):
        if not size.node.expr.free_symbols & of_inputs:  # that of the state of a random generator, for example
            numbers[size.node.expr] = size_hint(size)
    static = specialise(module, numbers, shape_env)
    if _symbolic(static):
        raise NotLowered("it has sizes that do not follow from those of its inputs")
    return static


def _numbers(value: Any) -> tuple[Any, ...]:
    """Return the numbers that a value has or is: sizes, strides and the offset of a tensor."""
    return (*value.shape, *value.stride(), value.storage_offset()) if isinstance(value, torch.Tensor) else (value,)


def _symbolic(module: GraphModule) -> list[Any]:
    """Return the symbolic numbers in the values of a graph."""
    leaves = (leaf for node in module.graph.nodes for leaf in pytree.tree_leaves(node.meta.get("val")))
    return [number for leaf in leaves for number in _numbers(leaf) if isinstance(number, SYMBOLS)]


def has_symbolic_sizes(module: GraphModule) -> bool:
    """Return whether a graph takes values whose sizes are not known."""
    return any(_is_symbolic(node.meta.get("val")) for node in module.graph.nodes if node.op == "placeholder")


def _is_symbolic(value: Any) -> bool:
    return any(isinstance(number, SYMBOLS) for number in _numbers(value))


def _example(value: Any) -> Any:
    """Return a value of the sizes with which a graph was traced; what is in it does not matter."""
    if isinstance(value, torch.Tensor):
        sizes, strides = ([size_hint(number) for number in numbers] for numbers in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype)
    return size_hint(value) if isinstance(value, torch.SymInt) else value
