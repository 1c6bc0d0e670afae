"""torch.compile's contract for backends, what is known while a graph is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]

# The registry and AOTAutograd's wrapper are documented for backends, under names that are not public.
from torch._decomp import core_aten_decompositions as core_aten_decompositions, get_decompositions as get_decompositions
from torch._dispatch.python import no_python_dispatcher
from torch._dynamo import lookup_backend as lookup_backend, register_backend as register_backend
from torch._dynamo.backends.common import aot_autograd as aot_autograd
from torch._dynamo.backends.registry import _BACKENDS as _registered
from torch._dynamo.eval_frame import cached_backends as _used  # whom torch._dynamo.reset() tells
from torch._dynamo.exc import InvalidBackend, TorchDynamoException as TorchDynamoException
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTInput
from torch._functorch.partitioners import default_partition as default_partition
from torch._guards import TracingContext, compile_context, tracing
from torch.fx.graph import _BoxedCodeGen
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Leave what a backend is called in (fake tensors, the Python dispatcher, the tracing context) for a while."""
    with _disable_current_modes(), no_python_dispatcher(), tracing(None), compile_context(None):
        yield


def is_compiling() -> bool:
    """Return whether this thread is in the middle of a compilation."""
    return TracingContext.try_get() is not None


boxed_code = _BoxedCodeGen  # makes a graph's code take its inputs in a list, which it empties, so that they end early


def registered_backends() -> Mapping[str, Any]:
    """Return the names of torch.compile's backends that are registered in this process or by an entry point."""
    with suppress(InvalidBackend):
        lookup_backend("")  # finds those of entry points
    return _registered


def reset_with_dynamo(backend: Any) -> None:
    """Let torch._dynamo.reset() call a backend's `reset`, also where a function that Dynamo knows calls the backend."""
    _used.setdefault(id(backend), backend)


def requires_full_graph() -> bool:
    """Return whether the graph that is being compiled belongs to a call of torch.compile with fullgraph=True."""
    try:
        translator = InstructionTranslator.current_tx()
    except AttributeError:
        return False
    return bool(translator.one_graph)


def is_static_input(placeholder: torch.fx.Node) -> bool:
    """Return whether an input of Dynamo's graph is a parameter or a buffer of a module, which keeps its identity."""
    return bool((placeholder.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"))


def input_number(placeholder: torch.fx.Node) -> int | None:
    """Return which input of Dynamo's graph an input of AOTAutograd's is, unchanged; None if it is none."""
    described = placeholder.meta.get("desc")
    return described.idx if isinstance(described, PlainAOTInput) else None


def written_inputs(count: int) -> frozenset[int]:
    """Return which inputs the function that is being compiled may write; all if AOTAutograd has renumbered them."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None or len(metadata.input_info) != count:
        return frozenset(range(count))
    return frozenset(
        number for number, info in enumerate(metadata.input_info) if info.mutates_data or info.mutates_metadata
    )


def overwritten_inputs(graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """Return the inputs of AOTAutograd's graph into which it copies results afterwards, by the result."""
    inputs = {node.meta.get("desc"): node for node in graph.find_nodes(op="placeholder")}
    output = graph.output_node()
    written = zip(output.args[0], output.meta.get("desc") or (), strict=False)  # type: ignore[arg-type]
    found = {result: one.mutated_input for result, one in written if isinstance(one, InputMutationAOTOutput)}
    return {result: inputs[one] for result, one in found.items() if one in inputs}


def boxed(function: Callable[..., Any], *, boxes: bool = True) -> Callable[..., Any]:
    """Mark a function that takes its inputs in a list and empties it, so that AOTAutograd passes it one; or unmark."""
    function._boxed_call = boxes  # type: ignore[attr-defined]
    return function


def eager(module: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return the boxed function that runs a graph of AOTAutograd's in PyTorch."""
    return make_boxed_func(module.forward)  # type: ignore[no-any-return]
