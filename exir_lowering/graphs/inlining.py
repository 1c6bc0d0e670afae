"""Calls of operators that share memory without declaring it are replaced by what they compute."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from networkx.utils import UnionFind
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from exir_lowering._upstream.fakes import FakeTensorMode, storage_of
from exir_lowering._upstream.guards import without_guards
from exir_lowering._upstream.operators import is_composite, is_view, written_arguments
from exir_lowering.errors import ignoring_errors
from exir_lowering.graphs.measures import tensors
from exir_lowering.graphs.operators.names import argument, is_mutating
from exir_lowering.graphs.walking import is_getitem, nested_graphs, writes

SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled


def inline_sharing(graph_module: GraphModule, mode: FakeTensorMode, *, nested: bool = False) -> None:
    """Replace composite operators that return an operand, or a view of one, without declaring it by what they compute.

    torch takes their results for new memory: a write into them, or into the operand, would reach one of the two only.
    Where nothing is written they are left alone: backends know what torch decomposes them to. Another graph calls one
    that is `nested`, and may write as well.
    """
    calls = list(graph_module.graph.nodes)
    for call in calls:
        for called in nested_graphs(graph_module, call):
            if call.target is SET_GRAD or writes(called.module):  # branches may not return what they are given
                inline_sharing(called.module, mode, nested=True)
    sharing = [call for call in calls if _shares(call, mode)]
    if not nested:
        written = _find_written(graph_module, frozenset(sharing))
        sharing = [call for call in sharing if call in written]
    for call in sharing:
        with mode, torch.no_grad():
            traced: GraphModule = make_fx(partial(_run, call))(*_values(call))
        env = dict(zip(traced.graph.find_nodes(op="placeholder"), call.all_input_nodes, strict=True))
        with graph_module.graph.inserting_before(call):
            returned: Any = graph_module.graph.graph_copy(traced.graph, env)
        for made, node in env.items():
            if made.op != "placeholder":
                node.meta = {**call.meta, "val": made.meta["val"]}
        replace_call(call, returned)


def _shares(call: Node, mode: FakeTensorMode) -> bool:
    """Return whether a composite operator, by its eager kernel, returns memory of an operand without declaring it."""
    return is_composite(call.target) and not (is_view(call.target) or is_mutating(call)) and shares_memory(call, mode)


def shares_memory(call: Node, mode: FakeTensorMode) -> bool:
    """Return whether a call of an operator, by its eager kernel, returns memory of an operand."""
    if not storages_of(call.meta.get("val")):
        return False  # `item` makes a symbol
    values = _values(call)
    fresh = mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env is not None else nullcontext()
    with ignoring_errors(), mode, torch.no_grad(), fresh, without_guards(mode.shape_env):
        return bool(storages_of(_run(call, *values)) & storages_of(values))
    return False


def storages_of(value: Any) -> set[int]:
    """Return the storages of all tensors in a value."""
    return set(map(storage_of, tensors(value)))


def _values(call: Node) -> list[Any]:
    return [operand.meta.get("val") for operand in call.all_input_nodes]


def _run(call: Node, *values: Any) -> Any:
    value_of = dict(zip(call.all_input_nodes, values, strict=True)).__getitem__
    args, kwargs = map_arg((call.args, dict(call.kwargs)), value_of)
    return call.target(*args, **kwargs)  # type: ignore[operator]


def _find_written(graph_module: GraphModule, sharing: frozenset[Node]) -> set[Node]:
    """Return the nodes whose values may be in memory that is written, before or after it was their value."""
    memory: Any = UnionFind(graph_module.graph.nodes)
    written: list[Node] = []
    for node in graph_module.graph.nodes:
        called = [found.module for found in nested_graphs(graph_module, node)]
        given = [argument(node, name) for name in written_arguments(node.target)]
        if node in sharing or called:
            given = node.all_input_nodes
        elif is_view(node.target) or is_getitem(node):
            given = [node.args[0]]
        if is_mutating(node) or any(map(writes, called)):
            written.append(node)
        operands = [one for each in given for one in (each if isinstance(each, (list, tuple)) else [each])]
        memory.union(node, *(operand for operand in operands if isinstance(operand, Node)))
    places = {memory[node] for node in written}
    return {node for node in graph_module.graph.nodes if memory[node] in places}


def insert_call(
    before: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, meta: dict[str, Any]
) -> Node:
    """Return a new call in front of a node of its graph."""
    with before.graph.inserting_before(before):
        made: Node = before.graph.call_function(target, args, kwargs)
    made.meta = meta
    return made


def replace_call(call: Node, returned: Node | list[Node]) -> None:
    """Let what a call returns be other nodes; those that take its elements go, and the call if nothing reads it."""
    if isinstance(returned, Node):
        call.replace_all_uses_with(returned)
        returned = []
    for user in list(call.users):
        if is_getitem(user):
            user.replace_all_uses_with(returned[user.args[1]])  # type: ignore[index]
            user.graph.erase_node(user)
    if not call.users:
        call.graph.erase_node(call)
