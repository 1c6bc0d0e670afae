"""Compiles graphs of AOTAutograd, and what has to be compiled again: for other weights, or for other sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule

from exir_lowering._upstream.dynamo import (
    FakeTensor,
    TorchDynamoException,
    boxed,
    eager,
    is_compiling,
    outside_tracing,
)
from exir_lowering.dynamo.capture import Captured, capture
from exir_lowering.dynamo.execution import Boxed
from exir_lowering.dynamo.hazards import NotLowered, UnboundedSizes
from exir_lowering.dynamo.logs import Kind, Log
from exir_lowering.dynamo.lowering import Compiled, Target, compile_graphs
from exir_lowering.dynamo.profit import takes_any
from exir_lowering.dynamo.specialized import Specialized, has_symbolic_sizes, specialize
from exir_lowering.dynamo.weights import Mark, Watched
from exir_lowering.errors import BackendFailure, LoweringError
from exir_lowering.errors.interrupts import let_through

Weights = Mapping[int, torch.Tensor]
"""The weights that may be lent to the first graph, by the number of the input that each is."""


class GraphCompiler:
    """Compiles graphs for one target; with `must_take` it is no success if no operator is taken."""

    def __init__(self, target: Target, *, must_take: bool, log: Log) -> None:
        self._target, self._must_take, self._log = target, must_take, log

    def compile(self, kind: Kind, modules: Mapping[str, GraphModule], weights: Weights) -> dict[str, Boxed]:
        """Compile graphs together, and return what computes each, by method.

        The kind is that of the first graph, for the report, and so are the weights, which may be lent. Raises
        NotLowered if they cannot be lowered, LoweringError as `lower` does, or if a partition cannot be executed here.
        """
        with outside_tracing():
            try:
                functions = self._compile(kind, modules, weights)
                return {name: _also_for_fakes(function, modules[name]) for name, function in functions.items()}
            except (UnboundedSizes, BackendFailure):
                if len(modules) > 1 or not any(map(has_symbolic_sizes, modules.values())):
                    raise
            ((name, module),) = modules.items()
            return {name: _also_for_fakes(self._specialize(kind, name, module, weights), module)}

    def _compile(self, kind: Kind, modules: Mapping[str, GraphModule], weights: Weights) -> dict[str, Boxed]:
        first = next(iter(modules))
        with _foreseen():
            captured = self._capture(modules, weights)
            marks = self._marks(captured[0], weights)
            compiled = compile_graphs(captured, self._target.of_kind(kind))
        self._note(kind, compiled)
        functions = {name: _keeping(function, compiled.kept) for name, function in compiled.functions.items()}
        if compiled.lent:
            functions[first] = self._watch(kind, first, modules[first], marks, functions[first])
        return functions

    def _capture(self, modules: Mapping[str, GraphModule], weights: Weights) -> list[Captured]:
        first = next(iter(modules))
        return [capture(name, module, weights if name == first else {}) for name, module in modules.items()]

    def _note(self, kind: Kind, compiled: Compiled) -> None:
        if compiled.report is not None:
            self._log.add(kind, compiled.report)
        if self._must_take and not (compiled.report and takes_any(compiled.report.methods)):
            raise NotLowered("it took no operator")

    def _marks(self, captured: Captured, weights: Weights) -> list[Mark]:
        placeholders = [node for node in captured.module.graph.nodes if node.op == "placeholder"]
        positions = [placeholders.index(node) for node in captured.lent.values()]
        return [Mark(position, weights[position], self._target.check_weights) for position in positions]

    def _watch(self, kind: Kind, name: str, module: GraphModule, marks: Sequence[Mark], function: Boxed) -> Boxed:
        """Return a function that is compiled again when a weight has changed."""
        positions = [each.position for each in marks]

        def again(args: Sequence[Any] | None) -> tuple[Sequence[Mark], Boxed]:
            if args is None:
                often = NotLowered("they change too often")
                self._log.note("weights as constants", kind, often, "the same graph with weights as inputs", warn=False)
                return self._again(kind, name, module, {})
            return self._again(kind, name, module, {position: args[position] for position in positions})

        return boxed(Watched(marks, function, again))

    def _again(self, kind: Kind, name: str, module: GraphModule, weights: Weights) -> tuple[Sequence[Mark], Boxed]:
        """Compile a graph for other weights; PyTorch runs it if that fails."""
        try:
            with outside_tracing(), _foreseen():
                captured = capture(name, module, weights)
                marks = self._marks(captured, weights)
                compiled = compile_graphs([captured], self._target.of_kind(kind))
            if compiled.report is not None:
                self._log.add(kind, compiled.report)
            return (marks if compiled.lent else ()), _keeping(compiled.functions[name], compiled.kept)
        except (NotLowered, LoweringError) as error:
            self._log.note("weights that have changed", kind, error, "eager")
            return (), eager(module)

    def _specialize(self, kind: Kind, name: str, module: GraphModule, weights: Weights) -> Boxed:
        """Return a function that is compiled for the sizes that it gets; PyTorch runs it where that fails later."""
        made: list[Specialized] = []
        positions = tuple(weights)  # the weights themselves may be replaced

        def compile_for(args: Sequence[Any]) -> Boxed:
            now = {position: args[position] for position in positions}
            try:
                with _foreseen():
                    static = specialize(module, args)
                return self.compile(kind, {name: static}, now)[name]
            except (NotLowered, LoweringError) as error:
                if not made:
                    raise
                self._log.note("other sizes", kind, error, "eager")
                return eager(module)

        made.append(Specialized(module, compile_for, weights))
        return boxed(made[0])


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
    """Return a boxed function that PyTorch runs where it is called with fake tensors, while more is compiled.

    So are the parts into which DistributedDataParallel divides a function: each shows what the next one gets.
    """
    in_pytorch = eager(module)

    def run(args: list[Any]) -> Any:
        if is_compiling() and any(isinstance(value, FakeTensor) for value in args):
            return in_pytorch(args)
        return function(args)

    return boxed(run)


def _keeping(function: Boxed, kept: Any) -> Boxed:
    """Return a boxed function that keeps what it needs."""

    def run(args: list[Any]) -> Any:
        return function(args)

    run.kept = kept  # type: ignore[attr-defined]
    return boxed(run)
