"""The torch.compile backend, top to bottom: options -> attempts, each through AOTAutograd -> the next backend."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch.fx import GraphModule

from exir_lowering import graphs
from exir_lowering._upstream import locks
from exir_lowering._upstream.dynamo import aot_autograd, lookup_backend, requires_full_graph, reset_with_dynamo, unboxed
from exir_lowering._upstream.schemas import higher_order_name
from exir_lowering.dynamo import logs, once
from exir_lowering.dynamo.attempts import Attempt, list_candidates
from exir_lowering.dynamo.decompositions import choose_decompositions, differentiable_attention
from exir_lowering.dynamo.function import Function
from exir_lowering.dynamo.hazards import NotLowered
from exir_lowering.dynamo.logs import Log
from exir_lowering.dynamo.minifying import warn_of_options, watched
from exir_lowering.dynamo.options import CompileOptions, read_options
from exir_lowering.errors import InputError, LoweringError

NAME = "exir_lowering"


def backend(
    module: GraphModule, example_inputs: Sequence[Any], *, options: Any = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's: `torch.compile(model, backend="exir_lowering", options={...})`.

    Args:
        module: The graph.
        example_inputs: Its inputs.
        options: A dict with attributes of `CompileOptions`.
        mode: Changes nothing: there are no modes. A warning says so.

    Returns:
        The function that runs the graph, with its contract.

    Raises:
        InputError, UnknownPluginError, PluginLoadError: An option is invalid.
        LoweringError: The graph could not be compiled, and an error was asked for: with `fullgraph=True`, a required
            coverage, or `fallback=None`.
    """
    reset_with_dynamo(backend)
    warn_of_mode(NAME, mode)
    warn_of_options(options)
    chosen = read_options(options)
    candidates, fallback = list_candidates(chosen)
    if fallback == "eager" and _needs_autograd(module):
        fallback = "aot_eager"
    strict = fallback is None or requires_full_graph() or _requires_coverage(chosen)
    with closing(Log()) as log:
        for position, candidate in enumerate(candidates):
            instead = candidates[position + 1].name if position + 1 < len(candidates) else None
            try:
                attempt, last = candidate.make(), instead is None
                compiled = through_autograd(module, example_inputs, attempt, chosen, log, strict=strict, last=last)
                log.backend = NAME
                return compiled
            except (NotLowered, LoweringError) as error:
                if instead is None and strict:
                    raise _as_error(candidate.name, error) from error
                log.note(candidate.name, "function", error, instead or str(fallback))
        log.backend = str(fallback)
        compiled = lookup_backend(log.backend)(module, list(example_inputs))
        return compiled


backend.__name__ = NAME  # what Dynamo's errors call it


def _reset() -> None:
    """Forget the reports, and what equal partitions share; torch._dynamo.reset() does it."""
    logs.forget()
    once.forget()


backend.reset = _reset  # type: ignore[attr-defined]


def warn_of_mode(name: str, mode: str | None) -> None:
    """Warn if a caller asks for a mode, which is inductor's; callers such as transformers always pass one."""
    if mode is not None:
        warnings.warn(
            f"torch.compile(mode={mode!r}): the backend {name!r} has no modes, and this one changes nothing. "
            "Pass options={...} instead, or mode=None.",
            stacklevel=3,
        )


def through_autograd(
    module: GraphModule,
    example_inputs: Sequence[Any],
    attempt: Attempt,
    options: CompileOptions,
    log: Log,
    *,
    strict: bool,
    last: bool = True,
    function: type[Function] = Function,
) -> Callable[..., Any]:
    """Compile a graph in one attempt, with its backward graph if it is differentiated.

    `strict`: what cannot be compiled is an error, in the backward graph too. `last`: no other attempt follows.
    `function` compiles the graphs that AOTAutograd makes. Raises NotLowered if the graph cannot be lowered,
    LoweringError as `lower` does, or if a partition cannot be executed here.
    """
    made = function(module, example_inputs, attempt, options, strict=strict, log=log)
    training = torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs
    )
    raises = strict and last
    wrapped = aot_autograd(
        fw_compiler=watched(made.forward, raises=raises),
        bw_compiler=watched(made.backward, raises=strict),
        inference_compiler=watched(made.inference, raises=raises),
        partition_fn=made.partition,
        decompositions=choose_decompositions(options.decompositions, training=training),
    )
    # AOTAutograd traces, as conversions in other threads do.
    with locks.conversion(), differentiable_attention(options.decompositions, training=training):
        return unboxed(wrapped(module, list(example_inputs)))


def _needs_autograd(module: GraphModule) -> bool:
    """Return whether "eager" does not run a graph right: checkpoints with other random numbers, regions not at all."""
    return any(
        higher_order_name(node.target) in ("tag_activation_checkpoint", "invoke_subgraph")
        for _, inner in graphs.walk(module)
        for node in inner.graph.nodes
    )


def _requires_coverage(options: CompileOptions) -> bool:
    return options.lowering.require_full or options.lowering.require_coverage > 0


def _as_error(name: str, error: Exception) -> LoweringError:
    if isinstance(error, LoweringError):
        return error
    return InputError(
        f"torch.compile: {name} cannot compile this graph: {error}. Without fullgraph=True, a required coverage "
        "and fallback=None, another backend would run it."
    )
