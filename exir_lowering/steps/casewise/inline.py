"""Graphs that only set whether gradients are recorded, taken into the graph around them as tracing would."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.conversion import COPIED_META, source_of

_SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled


def inline_no_grad(graph_module: GraphModule, step: str) -> frozenset[Node]:
    """Replace calls of graphs under `torch.no_grad()` by what they compute.

    Args:
        graph_module: The graph; it is changed.
        step: The name of the step in the history of nodes.

    Returns:
        The nodes that were taken in; their histories name the step already.
    """
    inlined: set[Node] = set()
    for call in list(graph_module.graph.nodes):
        if call.op == "call_function" and call.target is _SET_GRAD and call.args[0] is False:
            inlined.update(_inline(graph_module, call, step))
    for node in list(graph_module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph_module.graph.erase_node(node)
    return frozenset(inlined)


def _inline(graph_module: GraphModule, call: Node, step: str) -> list[Node]:
    nested = graphs.attribute(graph_module, str(call.args[1].target))  # type: ignore[union-attr]
    inline_no_grad(nested, step)
    inputs = iter(call.args[2:])
    env: dict[Node, Node] = {}
    for node in nested.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(inputs)  # type: ignore[assignment]
        elif node.op == "get_attr":
            return []
    inlined = []
    with graph_module.graph.inserting_before(call):
        for node in nested.graph.nodes:
            if node.op == "call_function":
                env[node] = graph_module.graph.node_copy(node, env.__getitem__)
                env[node].meta = _history(node, call, step)
                inlined.append(env[node])
    (returned,) = nested.graph.output_node().args
    _replace(graph_module, call, [env[node] for node in returned])
    return inlined


def _history(node: Node, call: Node, step: str) -> dict[str, Any]:
    """Return a node's metadata, with that of the call around it, to which torch ascribes what it traces there."""
    around = {name: call.meta[name] for name in COPIED_META if name in call.meta and name != "stack_trace"}
    return {**node.meta, **around, "from_node": [source_of(call, step)]}


def _replace(graph_module: GraphModule, call: Node, returned: list[Node]) -> None:
    for user in list(call.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(returned[user.args[1]])  # type: ignore[index]
            graph_module.graph.erase_node(user)
    if not call.users:
        graph_module.graph.erase_node(call)
