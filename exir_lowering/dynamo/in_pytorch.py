"""What stays in PyTorch: operators that draw random numbers, and calls of higher-order operators.

Random numbers are drawn in the order of the graph, so that a seed gives the same.

Of the higher-order calls that are not lowered, graphs of regions are inlined. Any other one is one operator of the
program that is lowered. The line knows only its tensors, as for any custom operator; the compiled graph has the call in
its place. So what is before and after it is lowered, and nothing is taken together across it that could not be.
"""

from __future__ import annotations

import itertools
import operator
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.operators import higher_order_name, wrapped_operator
from exir_lowering.graphs.order import topological

Path = tuple[int, ...]  # where a value is in what a call returns: the numbers by which it is taken, one after the other


HostCall = Callable[..., list[Any]]
"""A call of a higher-order operator, as a function of its tensors, numbers and name: what is used of its results."""


def is_host_call(node: Node) -> bool:
    """Return whether a node stands for a call."""
    return node.op == "call_function" and wrapped_operator(node.target) in _OPERATORS.values()


def host_call(node: Node) -> HostCall:
    """Return the call that a node stands for."""
    return _calls[str(node.args[2])]


def has_host_calls(module: GraphModule) -> bool:
    """Return whether a graph, or one nested in it, has a node that stands for a call."""
    return any(is_host_call(node) for _, node in graphs.every_node(module))


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


_OPERATORS = {
    False: _define("in_pytorch"),
    True: _define("random_in_pytorch", torch.Tag.nondeterministic_seeded),
}
"""What stands for calls; by whether they draw random numbers."""


LOWERED = frozenset({"cond"})  # higher-order operators that are lowered

_INLINED = "invoke_subgraph"

_RANDOM = frozenset({"run_and_save_rng_state", "run_with_rng_state"})

_ORDERED = frozenset({"with_effects"})  # operators whose calls do something beside returning results


def replace_calls(module: GraphModule) -> GraphModule:
    """Return an equal graph without calls that are not lowered, or the same one if it has none that can be replaced."""
    found = [node for node in module.graph.nodes if _is_inlined(module, node) or _stays(module, node)]
    return _Replacer(module).run() if found else module


def _is_inlined(module: GraphModule, node: Node) -> bool:
    """Return whether a node calls a graph whose values are known to be those of this call, but for sizes in symbols."""
    if node.op != "call_function" or higher_order_name(node.target) != _INLINED:
        return False
    inner = graphs.attribute(module, str(node.args[0].target))  # type: ignore[union-attr]
    placeholders = [each for each in inner.graph.nodes if each.op == "placeholder"]
    return len(placeholders) == len(node.args) - 2 and all(
        not isinstance(given, Node) or _described(given) == _described(placeholder)
        for given, placeholder in zip(node.args[2:], placeholders, strict=True)
    )


def _described(node: Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()}"
    return str(value)


def _stays(module: GraphModule, node: Node) -> bool:
    """Return whether a call is left to PyTorch, and all that is used of it are tensors."""
    if not _is_not_lowered(module, node) or higher_order_name(node.target) in _ORDERED:
        return False
    operands = [one for one in node.all_input_nodes if not _is_graph(module, one)]
    tensors = [one for one in operands if _is_tensor(one)]
    others = [one for one in operands if not isinstance(one.meta.get("val"), (torch.Tensor, torch.SymInt))]
    used = [value for value, _ in _used(node)]
    return bool(tensors and used) and not others and all(map(_is_tensor, used))


def _is_not_lowered(module: GraphModule, node: Node) -> bool:
    """Return whether a node calls a higher-order operator that is not lowered, or a graph with one."""
    name = higher_order_name(node.target) if node.op == "call_function" else None
    if name is None:
        return False
    return name not in LOWERED or any(
        _is_not_lowered(nested.module, one)
        for nested in graphs.nested_graphs(module, node)
        for one in nested.module.graph.nodes
    )


def _is_graph(module: GraphModule, node: Node) -> bool:
    return node.op == "get_attr" and isinstance(graphs.attribute(module, str(node.target)), GraphModule)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _used(node: Node, path: Path = ()) -> Iterator[tuple[Node, Path]]:
    """Yield what is used of a call: values, and where they are in what it returns."""
    if _is_tensor(node) or not all(graphs.is_getitem(user) for user in node.users):
        yield node, path
        return
    for user in node.users:
        yield from _used(user, (*path, int(user.args[1])))  # type: ignore[arg-type]


@dataclass
class _Replacer:
    """Copies a graph, with regions inlined, and a call of our operator for each call that stays."""

    module: GraphModule
    graph: Graph = field(default_factory=Graph)
    root: dict[str, Any] = field(default_factory=dict)
    made: list[HostCall] = field(default_factory=list)

    def run(self) -> GraphModule:
        env: dict[Node, Any] = {}
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                env[node] = self.graph.node_copy(node)
        results = self._add(self.module, env)
        self.graph.output(results).meta = dict(self.module.graph.output_node().meta)
        for node in self.graph.find_nodes(op="get_attr"):
            if not node.users:
                self.graph.erase_node(node)
        replaced = GraphModule(self.root, self.graph)
        replaced.meta = dict(self.module.meta)
        replaced.host_calls = self.made  # type: ignore[assignment]  # found by their names while the graph is there
        return replaced

    def _add(self, module: GraphModule, env: dict[Node, Any]) -> Any:
        """Add the nodes of a graph, whose inputs are there; return its results."""
        for node in module.graph.nodes:
            if node.op in ("placeholder", "output") or node in env:
                continue
            if _is_inlined(module, node):
                self._inline(module, node, env)
            elif _stays(module, node):
                self._call(module, node, env)
            elif node.op == "get_attr":
                target = f"held_{len(self.root)}"
                self.root[target] = graphs.attribute(module, str(node.target))
                env[node] = self.graph.get_attr(target)
                env[node].meta = dict(node.meta)
            elif all(source in env for source in node.all_input_nodes):
                env[node] = self.graph.node_copy(node, env.__getitem__)
        return torch.fx.map_arg(module.graph.output_node().args[0], env.__getitem__)

    def _inline(self, module: GraphModule, node: Node, env: dict[Node, Any]) -> None:
        inner = graphs.attribute(module, str(node.args[0].target))  # type: ignore[union-attr]
        placeholders = [each for each in inner.graph.nodes if each.op == "placeholder"]
        given = torch.fx.map_arg(tuple(node.args[2:]), env.__getitem__)
        results = self._add(inner, dict(zip(placeholders, given, strict=True)))
        for used, path in _used(node):
            env[used] = reduce(operator.getitem, path, results)

    def _call(self, module: GraphModule, node: Node, env: dict[Node, Any]) -> None:
        held = [one for one in node.all_input_nodes if _is_graph(module, one)]
        tensors = [one for one in node.all_input_nodes if _is_tensor(one)]
        numbers = [one for one in node.all_input_nodes if one not in (*held, *tensors)]
        used = list(_used(node))
        call = _make_call(module, node, (*tensors, *numbers), held, [path for _, path in used])
        self.made.append(call)
        name = f"{call.__name__} {uuid.uuid4().hex}"
        _calls[name] = call
        target = _OPERATORS[call.__name__ in _RANDOM or is_random(node)]
        made = self.graph.call_function(target, ([env[one] for one in tensors], [env[one] for one in numbers], name))
        made.meta = {**node.meta, "val": [value.meta["val"] for value, _ in used]}
        for position, (value, _) in enumerate(used):
            env[value] = self.graph.call_function(operator.getitem, (made, position))
            env[value].meta = dict(value.meta)


def _make_call(
    module: GraphModule, node: Node, operands: Sequence[Node], held: Sequence[Node], paths: Sequence[Path]
) -> HostCall:
    """Make a function of a call: a graph that has nothing else, and the graphs that it calls."""
    graph = Graph()
    values = {one: graph.placeholder(one.name) for one in operands} | {
        one: graph.get_attr(str(one.target)) for one in held
    }
    made = graph.node_copy(node, values.__getitem__)
    made.meta = {}
    graph.output(
        [reduce(lambda value, at: graph.call_function(operator.getitem, (value, at)), path, made) for path in paths]
    )
    root = {str(one.target): graphs.attribute(module, str(one.target)) for one in held}
    run = GraphModule(root, graph).forward

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
    return {path: _random_names(inner) for path, inner in graphs.walk(module)}


def restore_order(module: GraphModule, order: Order) -> bool:
    """Move nodes of a lowered graph so that random numbers are drawn in an order; return whether that can be done."""
    return all(_restore(inner, order.get(path, ())) for path, inner in graphs.walk(module))


def _restore(module: GraphModule, names: Sequence[str]) -> bool:
    if _random_names(module) == list(names):
        return True
    nodes = list(module.graph.nodes)
    numbers = {node: number for number, node in enumerate(nodes)}
    by_name = {node.name: number for node, number in numbers.items()}
    if not all(name in by_name for name in names):
        return False
    successors = [[numbers[user] for user in node.users] for node in nodes]
    for before, after in itertools.pairwise(names):
        successors[by_name[before]].append(by_name[after])
    chosen = topological(successors)
    if len(chosen) != len(nodes):
        return False
    last = module.graph.output_node()
    for number in chosen:
        if nodes[number] is not last:
            last.prepend(nodes[number])
    module.recompile()
    return True


def _random_names(module: GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes if is_random(node)]
