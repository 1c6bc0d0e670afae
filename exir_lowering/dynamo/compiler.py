"""The torch.compile backend, top to bottom: options -> attempts, each through AOTAutograd -> the next backend."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import torch
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from exir_lowering import graphs
from exir_lowering._upstream import dynamo, locks
from exir_lowering._upstream.operators import higher_order_name
from exir_lowering._upstream.tensors import is_readable
from exir_lowering.dynamo import logs, once
from exir_lowering.dynamo.compiled import Boxed
from exir_lowering.dynamo.graph import GraphCompiler
from exir_lowering.dynamo.logs import Log, NotLowered
from exir_lowering.dynamo.options import NAME, Attempt, list_candidates, read_options, requires_coverage
from exir_lowering.errors import InputError, LoweringError
from exir_lowering.fast import accelerated


def backend(
    module: GraphModule, example_inputs: Sequence[Any], *, options: Any = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile a Dynamo graph: `torch.compile(model, backend="exir_lowering", options={...})`.

    Args:
        module: The graph.
        example_inputs: Its inputs.
        options: A dict with attributes of `CompileOptions`.
        mode: Has no effect, as there are no modes; a warning says so.

    Returns:
        A function that runs the graph, with the graph's contract.

    Raises:
        InputError, UnknownPluginError, PluginLoadError: An option is invalid.
        LoweringError: The graph could not be compiled, and an error was requested: with `fullgraph=True`, a required
            coverage, or `fallback=None`.
    """
    dynamo.reset_with_dynamo(backend)
    if mode is not None:  # it is inductor's; callers such as transformers always pass one
        warnings.warn(
            f"torch.compile(mode={mode!r}): the backend {NAME!r} has no modes, so this has no effect. Pass "
            "options={...} instead, or mode=None.",
            stacklevel=2,
        )
    chosen = read_options(options)
    candidates, fallback = list_candidates(chosen)
    if fallback == "eager" and _needs_autograd(module):
        fallback = "aot_eager"
    strict = fallback is None or dynamo.requires_full_graph() or requires_coverage(chosen)
    with closing(Log()) as log:
        following = [*(name for name, _ in candidates[1:]), str(fallback or "nothing")]
        for number, ((name, make), instead) in enumerate(zip(candidates, following, strict=True), 1):
            last = number == len(candidates)
            try:
                function = _Function(module, example_inputs, make(), log, strict=strict)
                compiled = function.compile(module, example_inputs)
                log.backend = NAME
                return compiled
            except (NotLowered, LoweringError) as error:
                if last and strict and isinstance(error, LoweringError):
                    raise
                if last and strict:
                    raise InputError(
                        f"torch.compile: {name} cannot compile this graph: {error}. Without fullgraph=True, "
                        "a required coverage and fallback=None, another backend would run it."
                    ) from error
                log.note(name, "function", error, instead)
        log.backend = str(fallback)
        other: Callable[..., Any] = dynamo.lookup_backend(log.backend)(module, list(example_inputs))
        return other


backend.__name__ = NAME  # what Dynamo's errors call it


def _reset() -> None:
    """Forget the reports, and what equal partitions share; torch._dynamo.reset() does it."""
    logs.forget()
    once.forget()


backend.reset = _reset  # type: ignore[attr-defined]


def _needs_autograd(module: GraphModule) -> bool:
    """Return whether "eager" does not run a graph right: checkpoints with other random numbers, regions not at all."""
    return any(
        higher_order_name(node.target) in ("tag_activation_checkpoint", "invoke_subgraph")
        for _, node in graphs.every_node(module)
    )


class _Function:
    """Compiles the graphs that AOTAutograd makes of one function; `strict`: what cannot be compiled is an error."""

    def __init__(
        self, module: GraphModule, example_inputs: Sequence[Any], attempt: Attempt, log: Log, *, strict: bool
    ) -> None:
        self._attempt, self._strict, self._log = attempt, strict, log
        self._compiler = GraphCompiler(attempt, log)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        # The real parameters and buffers, but for the parts that DistributedDataParallel makes of a function.
        self._static = {
            number: weakref.ref(value)  # a function lives until its backward graph is compiled
            for number, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True))
            if is_readable(value) and dynamo.is_static_input(node)
        }
        self._inputs = len(placeholders)
        self._pairs: list[tuple[GraphModule, GraphModule]] = []
        self._backward: dict[str, Boxed] = {}  # what was compiled with forward graphs, by the text of the graph

    def compile(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile the function, as `GraphCompiler` does its graphs."""
        training = torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs
        )
        decompositions = self._attempt.options.decompositions
        wrapped = dynamo.aot_autograd(
            fw_compiler=self.forward,
            bw_compiler=self.backward,
            inference_compiler=self.inference,
            partition_fn=self.partition,
            decompositions=_choose_decompositions(decompositions, training=training),
        )
        # As products and softmax, attention has a backward graph in core ATen; own decompositions decide themselves.
        own = decompositions is not None
        attention: AbstractContextManager[None] = (
            sdpa_kernel(SDPBackend.MATH) if training and not own else nullcontext()
        )
        # AOTAutograd traces, as conversions in other threads do.
        with locks.conversion(), attention:
            return dynamo.boxed(wrapped(module, list(example_inputs)), boxes=False)

    def partition(self, joint: GraphModule, inputs: Any, **how: Any) -> tuple[GraphModule, GraphModule]:
        """Split a joint graph as AOTAutograd does by default, and remember which graphs belong together."""
        pair = dynamo.default_partition(joint, inputs, **how)
        self._pairs.append(pair)
        return pair

    def inference(self, module: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Compile the graph of a function that is not differentiated."""
        return self._compiler.compile("inference", {"forward": module}, self._weights(module))["forward"]

    def forward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Compile a forward graph, with its backward graph if that is known: their partitions are one group."""
        training = self._attempt.options.training
        if training not in ("both", "forward"):
            return dynamo.eager(module)
        weights = self._weights(module)
        backward = next((second for first, second in self._pairs if first is module), None)
        if training == "both" and backward is not None:
            try:
                functions = self._compiler.compile("forward", {"forward": module, "backward": backward}, weights)
                self._backward[str(backward.graph)] = functions["backward"]
                return functions["forward"]
            except (NotLowered, LoweringError):
                if self._strict:  # now, not in the first backward pass
                    alone = self._compiler.compile("backward", {"backward": backward}, {})["backward"]
                    self._backward[str(backward.graph)] = alone
        # Each alone: it shows which one it is, and one that needs to know its sizes is compiled for these.
        return self._compiler.compile("forward", {"forward": module}, weights)["forward"]

    def backward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Return what was compiled with the forward graph, or compile a backward graph alone."""
        if self._attempt.options.training not in ("both", "backward"):
            return dynamo.eager(module)
        known = self._backward.get(str(module.graph))
        if known is not None:
            return known
        try:
            return self._compiler.compile("backward", {"backward": module}, {})["backward"]
        except (NotLowered, LoweringError) as error:
            if self._strict:
                raise
            self._log.note(self._attempt.name, "backward", error, "eager")
            return dynamo.eager(module)

    def _weights(self, module: GraphModule) -> dict[int, torch.Tensor]:
        """Return the parameters and buffers among a graph's inputs, without those that it writes."""
        written = dynamo.written_inputs(self._inputs)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        numbers = {position: dynamo.input_number(node) for position, node in enumerate(placeholders)}
        found = {
            position: self._static[number]()
            for position, number in numbers.items()
            if number is not None and number in self._static and number not in written
        }
        return {position: weight for position, weight in found.items() if weight is not None}


# What AOTAutograd decomposes: core ATen, except where that changes random numbers or gradients.

_KEPT = (
    "aten.bernoulli",  # decomposed, it draws other numbers than in eager PyTorch
    "aten.rrelu",
)
_KEPT_IN_TRAINING = ("aten._scaled_dot_product_flash_attention_for_cpu",)
"""Decomposed, it returns something else than what its own backward operator needs."""


def _choose_decompositions(given: Mapping[Any, Callable[..., Any]] | None, *, training: bool) -> dict[Any, Any]:
    """Return the decompositions for a graph, which may be differentiated; None stands for the default ones."""
    if given is not None:
        return dict(given)
    kept = _KEPT + (_KEPT_IN_TRAINING if training else ())
    with accelerated(step="look up"):
        core: Mapping[Any, Any] = dynamo.core_aten_decompositions()
        chosen = {operator: made for operator, made in core.items() if not str(operator).startswith(kept)}
    return {**chosen, _NORM: _decompose_mixed_norm}


_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_norm = dynamo.get_decompositions([_NORM])[_NORM]


def _decompose_mixed_norm(x: torch.Tensor, weight: torch.Tensor | None, *args: Any) -> Any:
    """Decompose a batch normalisation whose weights have another dtype, as with autocast."""
    # What it saves for its gradient has another dtype in a graph than when it is run.
    return NotImplemented if weight is None or weight.dtype is x.dtype else _norm(x, weight, *args)
