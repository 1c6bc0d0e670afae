"""One function of Dynamo's, compiled in one attempt: what AOTAutograd calls with its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.dynamo import boxed, default_partition, eager, input_number, is_static_input, outside_tracing, written_inputs
from exir_lowering.dynamo.attempts import Attempt
from exir_lowering.dynamo.capture import Captured, capture
from exir_lowering.dynamo.execution import Boxed
from exir_lowering.dynamo.hazards import NotLowered
from exir_lowering.dynamo.lowering import Target, compile_graphs
from exir_lowering.dynamo.options import CompileOptions
from exir_lowering.dynamo.logs import Fallback, Kind, Log
from exir_lowering.dynamo.weights import Mark, Watched, mark
from exir_lowering.errors import LoweringError


class Function:
    """Compiles the graphs that AOTAutograd makes of one function.

    Args:
        module: Dynamo's graph.
        example_inputs: Its inputs, with the real parameters and buffers.
        attempt: How to partition.
        options: The caller's options.
        strict: Whether what cannot be compiled is an error.
        log: Where it is noted what happened.
    """

    def __init__(
        self,
        module: GraphModule,
        example_inputs: Sequence[Any],
        attempt: Attempt,
        options: CompileOptions,
        *,
        strict: bool,
        log: Log,
    ) -> None:
        self._attempt, self._options, self._strict, self._log = attempt, options, strict, log
        self._target = Target(attempt.partitioners, attempt.backends, options.delegates, options.lowering)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._static = {
            number: value
            for number, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True))
            if isinstance(value, torch.Tensor) and is_static_input(node)
        }
        self._pairs: list[tuple[GraphModule, GraphModule]] = []
        self._backward: list[tuple[str, Boxed]] = []

    def partition(self, joint: GraphModule, inputs: Any, **how: Any) -> tuple[GraphModule, GraphModule]:
        """Split a joint graph as AOTAutograd does by default, and remember which graphs belong together."""
        pair = default_partition(joint, inputs, **how)
        self._pairs.append(pair)
        return pair

    def inference(self, module: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Compile the graph of a function that is not differentiated."""
        return self._compile("inference", [self._capture("forward", module)])["forward"]

    def forward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Compile a forward graph, with its backward graph if that is known: their partitions are one group."""
        training = self._options.training
        if training not in ("both", "forward"):
            return eager(module)
        captured = self._capture("forward", module)
        backward = next((second for first, second in self._pairs if first is module), None)
        if training == "both" and backward is not None:
            try:
                functions = self._compile("forward", [captured, capture("backward", backward, {})])
                self._backward.append((_text(backward), functions["backward"]))
                return functions["forward"]
            except (NotLowered, LoweringError):
                pass  # each alone, so that it shows which one it is
        return self._compile("forward", [captured])["forward"]

    def backward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Return what was compiled with the forward graph, or compile a backward graph alone."""
        if self._options.training not in ("both", "backward"):
            return eager(module)
        text = _text(module)
        for known, function in self._backward:
            if known == text:
                return function
        try:
            return self._compile("backward", [capture("backward", module, {})])["backward"]
        except (NotLowered, LoweringError) as error:
            if self._strict:
                raise
            self._log.fallbacks.append(describe(self._attempt.name, "backward", error, "eager"))
            return eager(module)

    def _capture(self, name: str, module: GraphModule, args: Sequence[Any] | None = None) -> Captured:
        """Make the program of a graph, with the weights that can be lent: of `args`, if these are given."""
        lent = {}
        written = written_inputs() if args is None else frozenset()
        for position, node in enumerate(node for node in module.graph.nodes if node.op == "placeholder"):
            number = input_number(node)
            if number is None or number not in self._static or number in written:
                continue
            lent[node] = self._static[number] if args is None else args[position]
        return capture(name, module, lent)

    def _compile(self, kind: Kind, captured: Sequence[Captured]) -> dict[str, Boxed]:
        compiled = compile_graphs(captured, self._target)
        taken = sum(len(method.partitions) for method in compiled.report.methods) if compiled.report else 0
        if self._attempt.must_take and not taken:
            raise NotLowered("it took no operator")
        if compiled.report is not None:
            self._log.reports.append((kind, compiled.report))
        functions = {name: _keeping(function, compiled.kept) for name, function in compiled.functions.items()}
        if compiled.lent:
            with outside_tracing():
                functions["forward"] = self._watch(kind, captured[0], functions["forward"])
        return functions

    def _watch(self, kind: Kind, captured: Captured, function: Boxed) -> Boxed:
        """Return a function that is compiled again when a weight has changed."""
        module = captured.module

        def again(args: Sequence[Any] | None) -> tuple[Sequence[Mark], Boxed]:
            now = capture("forward", module, {}) if args is None else self._capture("forward", module, args)
            compiled = compile_graphs([now], self._target)
            if compiled.report is not None:
                self._log.reports.append((kind, compiled.report))
            marks = self._marks(now) if compiled.lent else ()
            return marks, _keeping(compiled.functions["forward"], compiled.kept)

        return boxed(Watched(self._marks(captured), function, again))

    def _marks(self, captured: Captured) -> list[Mark]:
        placeholders = [node for node in captured.module.graph.nodes if node.op == "placeholder"]
        state = captured.program.state_dict if captured.program is not None else {}
        contents = self._options.lowering.check_weights
        return [
            mark(placeholders.index(node), state[target], contents=contents) for target, node in captured.lent.items()
        ]


def describe(attempt: str, graph: str, error: Exception, instead: str) -> Fallback:
    """Return the note of what could not be compiled."""
    node = getattr(error, "node", None)
    source = graphs.source_line(node) if isinstance(node, Node) else ""
    reason = error.reason if isinstance(error, NotLowered) else f"{type(error).__name__}: {error}"
    return Fallback(attempt, graph, reason, source, instead)


def _text(module: GraphModule) -> str:
    return str(module.graph)


def _keeping(function: Boxed, kept: Any) -> Boxed:
    """Return a boxed function that keeps what it needs."""

    def run(args: list[Any]) -> Any:
        return function(args)

    run.kept = kept  # type: ignore[attr-defined]
    return boxed(run)
