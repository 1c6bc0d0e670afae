"""What stays in PyTorch: operators that draw random numbers, in the graph's order, and calls of higher-order operators.

One that is not lowered is a custom operator in the program that is lowered; the compiled graph has the call instead.
"""

from __future__ import annotations

import itertools
import operator
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.operators import higher_order_name, wrapped_operator
from exir_lowering.graphs.order import topological

HostCall = Callable[..., list[Any]]
"""A call of a higher-order operator, as a function of its tensors, numbers and name: what is used of its results."""

LOWERED = frozenset({"cond"})  # higher-order operators that are lowered

_RANDOM = frozenset({"run_and_save_rng_state", "run_with_rng_state"})

_calls: weakref.WeakValueDictionary[str, HostCall] = weakref.WeakValueDictionary()
"""Calls by name. No name is given twice, so nothing that was kept of another call, in a cache on disk too, is taken."""


def _define(name: str, *tags: torch.Tag) -> Any:
    schema = "(Tensor[] tensors, SymInt[] numbers, str name) -> Tensor[]"
    torch.library.define(f"exir_lowering_dynamo::{name}", schema, tags=tags)
    torch.library.register_fake(f"exir_lowering_dynamo::{name}")(_describe)
    return getattr(torch.ops.exir_lowering_dynamo, name).default


def _describe(tensors: Sequence[Any], numbers: Sequence[Any], name: str) -> list[torch.Tensor]:
    """Return fake results that share no memory; a random state comes from torch as a real tensor."""
    returned = _calls[name](tensors, numbers)
    return [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device) for one in returned]


_IN_PYTORCH = _define("in_pytorch")
_RANDOM_IN_PYTORCH = _define("random_in_pytorch", torch.Tag.nondeterministic_seeded)


def is_host_call(node: Node) -> bool:
    """Return whether a node stands for a call."""
    return node.op == "call_function" and wrapped_operator(node.target) in (_IN_PYTORCH, _RANDOM_IN_PYTORCH)


def host_call(node: Node) -> HostCall:
    """Return the call that a node stands for."""
    return _calls[str(node.args[2])]


def replace_calls(module: GraphModule) -> GraphModule:
    """Return an equal graph with our operator for each call that stays; the same one if it has none."""
    if not any(_stays(module, node) for node in module.graph.nodes):
        return module
    replaced = graphs.copy_graph_module(module)
    graph, made = replaced.graph, list[HostCall]()
    for node in [node for node in graph.nodes if _stays(replaced, node)]:
        tensors, numbers = _operands(replaced, node)
        used = list(_used(node))
        call = _make_call(replaced, node, [*tensors, *numbers], [path for _, path in used])
        made.append(call)
        name = f"{call.__name__} {uuid.uuid4().hex}"
        _calls[name] = call
        target = _RANDOM_IN_PYTORCH if call.__name__ in _RANDOM or is_random(node) else _IN_PYTORCH
        with graph.inserting_before(node):
            called = graph.call_function(target, (tensors, numbers, name))
            called.meta = {**node.meta, "val": [value.meta["val"] for value, _ in used]}
            for position, (value, _) in enumerate(used):
                taken = graph.call_function(operator.getitem, (called, position))
                taken.meta = dict(value.meta)
                value.replace_all_uses_with(taken)
        left = [node]
        for one in left:
            left.extend(one.users)
        for one in reversed(left):
            graph.erase_node(one)
    replaced.host_calls = made  # type: ignore[assignment]  # found by their names while the graph is there
    return replaced


def _stays(module: GraphModule, node: Node) -> bool:
    """Return whether a call is left to PyTorch, and all that is used of it are tensors."""
    # Calls with effects do something beside returning results.
    if not _is_not_lowered(module, node) or higher_order_name(node.target) == "with_effects":
        return False
    tensors, numbers = _operands(module, node)
    used = [value for value, _ in _used(node)]
    others = any(not isinstance(one.meta.get("val"), torch.SymInt) for one in numbers)
    return bool(tensors and used) and not others and all(map(_is_tensor, used))


def _is_not_lowered(module: GraphModule, node: Node) -> bool:
    """Return whether a node calls a higher-order operator that is not lowered, or a graph with one."""
    name = higher_order_name(node.target) if node.op == "call_function" else None
    inner = () if name is None else graphs.nested_graphs(module, node)
    return name is not None and (
        name not in LOWERED
        or any(_is_not_lowered(one.module, each) for one in inner for each in one.module.graph.nodes)
    )


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _operands(module: GraphModule, node: Node) -> tuple[list[Node], list[Node]]:
    """Return the operands of a call that are tensors, and those that are neither tensors nor graphs."""
    values = [one for one in node.all_input_nodes if not _is_graph(module, one)]
    return [one for one in values if _is_tensor(one)], [one for one in values if not _is_tensor(one)]


def _is_graph(module: GraphModule, node: Node) -> bool:
    return node.op == "get_attr" and isinstance(graphs.attribute(module, str(node.target)), GraphModule)


def _used(node: Node, path: tuple[int, ...] = ()) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """Yield what is used of a call: values, and by which numbers they are taken from what it returns."""
    if _is_tensor(node) or not all(graphs.is_getitem(user) for user in node.users):
        yield node, path
        return
    for user in node.users:
        yield from _used(user, (*path, int(user.args[1])))  # type: ignore[arg-type]


def _make_call(module: GraphModule, node: Node, operands: Sequence[Node], paths: Sequence[tuple[int, ...]]) -> HostCall:
    """Make a function of a call: a graph that has nothing else, and the graphs that it calls."""
    held = [one for one in node.all_input_nodes if _is_graph(module, one)]
    graph = Graph()
    values = {one: graph.placeholder(one.name) for one in operands}
    values |= {one: graph.get_attr(str(one.target)) for one in held}
    made = graph.node_copy(node, values.__getitem__)
    made.meta = {}
    graph.output(
        [reduce(lambda one, at: graph.call_function(operator.getitem, (one, at)), path, made) for path in paths]
    )
    run = GraphModule({str(one.target): graphs.attribute(module, str(one.target)) for one in held}, graph).forward

    def call(tensors: Sequence[Any], numbers: Sequence[Any], name: str = "") -> list[Any]:
        return run(*tensors, *numbers)  # type: ignore[no-any-return]

    call.__name__ = str(higher_order_name(node.target))
    return call


Order = Mapping[tuple[str, ...], Sequence[str]]
"""The nodes that draw random numbers, by the path of their graph, in the order in which they run."""


def is_random(node: Node) -> bool:
    """Return whether a node draws random numbers, itself or in a graph that it calls."""
    if node.op != "call_function":
        return False
    if torch.Tag.nondeterministic_seeded in getattr(wrapped_operator(node.target), "tags", ()):
        return True
    owner = node.graph.owning_module
    return owner is not None and any(list_random(nested.module) for nested in graphs.nested_graphs(owner, node))


def list_random(module: GraphModule) -> list[str]:
    """Return the operators that draw random numbers, in the order in which they stand."""
    return [graphs.operator_name(node) for _, node in graphs.every_node(module) if is_random(node)]


def order_of(module: GraphModule) -> dict[tuple[str, ...], list[str]]:
    """Return in which order the random numbers of a graph, and of the graphs nested in it, are drawn."""
    return {path: [node.name for node in inner.graph.nodes if is_random(node)] for path, inner in graphs.walk(module)}


def restore_order(module: GraphModule, order: Order) -> bool:
    """Move nodes of a lowered graph so that random numbers are drawn in an order; return whether that can be done."""
    current = order_of(module)
    for path, inner in graphs.walk(module):
        names = order.get(path, ())
        if current[path] == list(names):
            continue
        nodes = list(inner.graph.nodes)
        numbers = {node: number for number, node in enumerate(nodes)}
        by_name = {node.name: number for node, number in numbers.items()}
        successors = [[numbers[user] for user in node.users] for node in nodes]
        if not all(name in by_name for name in names):
            return False
        for before, after in itertools.pairwise(names):
            successors[by_name[before]].append(by_name[after])
        chosen = topological(successors)
        if len(chosen) != len(nodes):
            return False
        last = inner.graph.output_node()
        for number in chosen:
            if nodes[number] is not last:
                last.prepend(nodes[number])
        inner.recompile()
    return True
