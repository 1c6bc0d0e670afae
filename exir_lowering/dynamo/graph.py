"""Compiles graphs of AOTAutograd, and what has to be compiled again: for other weights, or for other sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule

from exir_lowering._upstream.dynamo import TorchDynamoException, boxed, eager, is_compiling, outside_tracing
from exir_lowering._upstream.fakes import FakeTensor
from exir_lowering.dynamo.attempts import Attempt
from exir_lowering.dynamo.capture import Captured, NotLowered, UnboundedSizes, capture
from exir_lowering.dynamo.compiled import Boxed
from exir_lowering.dynamo.logs import Kind, Log
from exir_lowering.dynamo.lowering import CompiledGraphs, compile_graphs
from exir_lowering.dynamo.partitioning import takes_any
from exir_lowering.dynamo.specialized import Specialized, has_symbolic_sizes, specialize
from exir_lowering.dynamo.watched_weights import Mark, Watched
from exir_lowering.errors import BackendFailure, LoweringError
from exir_lowering.errors.interrupts import let_through

Modules = Mapping[str, GraphModule]
"""Graphs that are compiled together, by method."""

Weights = Mapping[int, torch.Tensor]
"""The weights that may be baked into the first graph, by the number of the input that each is."""


class GraphCompiler:
    """Compiles graphs in one attempt: each is captured, lowered and made callable."""

    def __init__(self, attempt: Attempt, log: Log) -> None:
        self._attempt, self._log = attempt, log

    def compile(self, kind: Kind, modules: Modules, weights: Weights) -> dict[str, Boxed]:
        """Compile graphs together, whose first has this kind and weights; NotLowered, or LoweringError as `lower`."""
        with outside_tracing():
            try:
                functions = self._compile(kind, modules, weights)
                return {name: _also_for_fakes(function, modules[name]) for name, function in functions.items()}
            except (UnboundedSizes, BackendFailure):
                if len(modules) > 1 or not any(map(has_symbolic_sizes, modules.values())):
                    raise
            ((name, module),) = modules.items()
            return {name: _also_for_fakes(self._specialize(kind, name, module, weights), module)}

    def _compile(self, kind: Kind, modules: Modules, weights: Weights) -> dict[str, Boxed]:
        compiled, marks = self._lower(kind, modules, weights)
        if self._attempt.must_take and not (compiled.report and takes_any(compiled.report.methods)):
            raise NotLowered("it took no operator")
        functions = dict(compiled.functions)
        if compiled.baked:
            first, module = next(iter(modules.items()))
            functions[first] = self._watch(kind, first, module, marks, functions[first])
        return functions

    def _lower(self, kind: Kind, modules: Modules, weights: Weights) -> tuple[CompiledGraphs, list[Mark]]:
        """Capture graphs, and lower them together; return also what the baked-in weights were."""
        with _foreseen():
            captured = capture_all(modules, weights)
            placeholders = [node for node in captured[0].module.graph.nodes if node.op == "placeholder"]
            positions = [placeholders.index(node) for node in captured[0].baked.values()]
            how = self._attempt.options.check_weights
            marks = [Mark(position, weights[position], how) for position in positions]
            compiled = compile_graphs(kind, captured, self._attempt)
        if compiled.report is not None:
            self._log.add(kind, compiled.report)
        return compiled, marks

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
                    compiled, found = self._lower(kind, {name: module}, weights)
                return (found if compiled.baked else ()), compiled.functions[name]
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


def capture_all(modules: Modules, weights: Weights) -> list[Captured]:
    """Capture graphs, the first one with weights."""
    return [capture(name, module, {} if number else weights) for number, (name, module) in enumerate(modules.items())]


@contextmanager
def _foreseen() -> Iterator[None]:
    """Raise NotLowered for an exception that nobody has foreseen: PyTorch can still run the graph."""
    try:
        yield
    except (NotLowered, LoweringError, TorchDynamoException):
        raise
    except Exception as error:
        let_through(error)
        raise NotLowered(f"{type(error).__name__}: {error}. Please report this function") from error


def _also_for_fakes(function: Boxed, module: GraphModule) -> Boxed:
    """Return a boxed function that PyTorch runs where it is called with fake tensors, while more is compiled."""
    # So are the parts into which DistributedDataParallel divides a function: each shows what the next one gets.
    in_pytorch = eager(module)

    def run(args: list[Any]) -> Any:
        if is_compiling() and any(isinstance(value, FakeTensor) for value in args):
            return in_pytorch(args)
        return function(args)

    return boxed(run)
