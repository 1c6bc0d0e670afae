"""One function of Dynamo's, compiled in one attempt: what AOTAutograd calls with its graphs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from exir_lowering._upstream.dynamo import default_partition, eager, input_number, is_static_input, written_inputs
from exir_lowering.dynamo.attempts import Attempt
from exir_lowering.dynamo.execution import Boxed
from exir_lowering.dynamo.graph import GraphCompiler
from exir_lowering.dynamo.hazards import NotLowered
from exir_lowering.dynamo.logs import Log
from exir_lowering.dynamo.lowering import Target
from exir_lowering.dynamo.options import CompileOptions
from exir_lowering.errors import LoweringError
from exir_lowering.graphs.checksums import is_readable


class Function:
    """Compiles the graphs that AOTAutograd makes of one function.

    The example inputs have the real parameters and buffers, but for the parts that DistributedDataParallel makes of it.
    With `strict`, what cannot be compiled is an error.
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
        self._compiler = self._make_compiler()
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._static = {
            number: weakref.ref(value)  # a function lives until its backward graph is compiled
            for number, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True))
            if is_readable(value) and is_static_input(node)
        }
        self._inputs = len(placeholders)
        self._pairs: list[tuple[GraphModule, GraphModule]] = []
        self._backward: list[tuple[str, Boxed]] = []

    def _make_compiler(self) -> GraphCompiler:
        target = target_of(self._attempt, self._options)
        return GraphCompiler(target, must_take=self._attempt.must_take, log=self._log)

    def partition(self, joint: GraphModule, inputs: Any, **how: Any) -> tuple[GraphModule, GraphModule]:
        """Split a joint graph as AOTAutograd does by default, and remember which graphs belong together."""
        pair = default_partition(joint, inputs, **how)
        self._pairs.append(pair)
        return pair

    def inference(self, module: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Compile the graph of a function that is not differentiated."""
        return self._compiler.compile("inference", {"forward": module}, self._weights(module))["forward"]

    def forward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Compile a forward graph, with its backward graph if that is known: their partitions are one group."""
        training = self._options.training
        if training not in ("both", "forward"):
            return eager(module)
        weights = self._weights(module)
        backward = next((second for first, second in self._pairs if first is module), None)
        if training == "both" and backward is not None:
            try:
                functions = self._compiler.compile("forward", {"forward": module, "backward": backward}, weights)
                self._backward.append((_text(backward), functions["backward"]))
                return functions["forward"]
            except (NotLowered, LoweringError):
                if self._strict:  # now, not in the first backward pass
                    alone = self._compiler.compile("backward", {"backward": backward}, {})["backward"]
                    self._backward.append((_text(backward), alone))
        # Each alone: it shows which one it is, and one that needs to know its sizes is compiled for these.
        return self._compiler.compile("forward", {"forward": module}, weights)["forward"]

    def backward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Return what was compiled with the forward graph, or compile a backward graph alone."""
        if self._options.training not in ("both", "backward"):
            return eager(module)
        text = _text(module)
        for known, function in self._backward:
            if known == text:
                return function
        try:
            return self._compiler.compile("backward", {"backward": module}, {})["backward"]
        except (NotLowered, LoweringError) as error:
            if self._strict:
                raise
            self._log.note(self._attempt.name, "backward", error, "eager")
            return eager(module)

    def _weights(self, module: GraphModule) -> dict[int, torch.Tensor]:
        """Return the parameters and buffers among a graph's inputs, without those that it writes."""
        written = written_inputs(self._inputs)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        numbers = {position: input_number(node) for position, node in enumerate(placeholders)}
        found = {
            position: self._static[number]()
            for position, number in numbers.items()
            if number is not None and number in self._static and number not in written
        }
        return {position: weight for position, weight in found.items() if weight is not None}


def target_of(attempt: Attempt, options: CompileOptions) -> Target:
    """Return what the graphs of an attempt are compiled for."""
    return Target(
        attempt.partitioners,
        attempt.backends,
        options.delegates,
        options.lowering,
        options.check_weights,
        options.partitions,
    )


def _text(module: GraphModule) -> str:
    return str(module.graph)
