"""What torch.compile would do with a function, as values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from exir_lowering._upstream.explaining import GraphCompileReason, call_compiled, ending
from exir_lowering.dynamo.attempts import list_candidates
from exir_lowering.dynamo.debugging import explain_graph
from exir_lowering.dynamo.explained import ExplainedGraph, Explanation, GraphBreak
from exir_lowering.dynamo.options import read_options
from exir_lowering.graphs.sources import Frame


def explain(
    function: Callable[..., Any], *inputs: Any, options: Any = None, dynamic: bool | None = None, **keywords: Any
) -> Explanation:
    """Return what `torch.compile(function, backend="exir_lowering")` would do, over all its graphs and graph breaks.

    The function is called once, with the inputs, in PyTorch; no backend is called. What was compiled of it before stays
    as it is. Backward graphs are planned where inputs or parameters require gradients, and these are enabled.

    Args:
        function: A function or a module, compiled or not.
        inputs: What it is called with.
        options: As for the backend.
        dynamic: As for `torch.compile`.
        keywords: What it is called with by name.

    Raises:
        InputError, UnknownPluginError, PluginLoadError: An option is invalid.
    """
    chosen = read_options(options)
    list_candidates(chosen)  # so that a wrong option is an error before the function is called
    graphs: list[ExplainedGraph] = []

    def collect(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        explained = explain_graph(module, example_inputs, chosen, len(graphs))
        reason = ending(module)
        if reason is not None and reason.graph_break:
            explained = dataclasses.replace(explained, graph_break=_graph_break(reason))
        graphs.append(explained)
        forward: Callable[..., Any] = module.forward
        return forward

    reasons = call_compiled(function, inputs, keywords, collect, dynamic)
    return Explanation(tuple(graphs), tuple(dict.fromkeys(map(_graph_break, reasons))))


def _graph_break(reason: GraphCompileReason) -> GraphBreak:
    where = [Frame(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in reason.user_stack[-1:]]
    return GraphBreak(reason.reason, str(where[0]) if where else "")
