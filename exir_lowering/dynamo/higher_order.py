"""Calls of higher-order operators that are not lowered: graphs of regions are inlined, the others stay in PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.schemas import higher_order_name
from exir_lowering._upstream.trees import pytree
from exir_lowering.dynamo.host_calls import HostCall, Operand, Path, stand_in, take
from exir_lowering.dynamo.random_numbers import is_random

LOWERED = frozenset({"cond"})
"""Higher-order operators that are lowered."""

_INLINED = "invoke_subgraph"

_RANDOM = frozenset({"run_and_save_rng_state", "run_with_rng_state"})

_ORDERED = frozenset({"with_effects"})
"""Operators whose calls do something beside returning results."""


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
    tensors = [one for one in operands if isinstance(one.meta.get("val"), torch.Tensor)]
    others = [one for one in operands if not isinstance(one.meta.get("val"), (torch.Tensor, torch.SymInt))]
    used = [value for value, _ in _used(node)]
    return bool(tensors and used) and not others and all(map(_is_tensor, used))


def _is_not_lowered(module: GraphModule, node: Node) -> bool:
    """Return whether a node calls a higher-order operator that is not lowered, or a graph with one."""
    name = higher_order_name(node.target) if node.op == "call_function" else None
    if name is None:
        return False
    return name not in LOWERED or any(
        _is_not_lowered(inner, one)
        for nested in graphs.nested_graphs(module, node)
        for _, inner in graphs.walk(nested.module)
        for one in inner.graph.nodes
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


def _plain(value: Any) -> Any:
    """Return arguments of a node as they are when it is called: in lists and dicts, not in those of torch.fx."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(_plain, value)] if isinstance(value, list) else tuple(map(_plain, value))
    return value


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
            env[used] = take(results, path)

    def _call(self, module: GraphModule, node: Node, env: dict[Node, Any]) -> None:
        operands: Mapping[bool, list[Node]] = {False: [], True: []}

        def leaf(value: Any) -> Any:
            if not isinstance(value, Node):
                return value
            if _is_graph(module, value):
                return graphs.attribute(module, str(value.target))
            number = not _is_tensor(value)
            operands[number].append(env[value])
            return Operand(number, len(operands[number]) - 1)

        leaves, structure = pytree.tree_flatten((_plain(node.args), _plain(node.kwargs)))
        used = list(_used(node))
        call = HostCall(node.target, tuple(map(leaf, leaves)), structure, tuple(path for _, path in used))
        self.made.append(call)
        target, name = stand_in(call, random=call.__name__ in _RANDOM or is_random(node))
        made = self.graph.call_function(target, (operands[False], operands[True], name))
        made.meta = {**node.meta, "val": [value.meta["val"] for value, _ in used]}
        for position, (value, _) in enumerate(used):
            env[value] = self.graph.call_function(operator.getitem, (made, position))
            env[value].meta = dict(value.meta)
