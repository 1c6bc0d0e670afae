"""A lowered program as a Python function: its partitions by their delegates, the rest by PyTorch.

The function has AOTAutograd's boxed convention: it takes its inputs in a list and empties it, so that an input that
nobody else has ends at its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.delegates import LoweredBackendModule
from exir_lowering._upstream.dynamo import boxed_code
from exir_lowering._upstream.fakes import dim_order
from exir_lowering._upstream.schemas import higher_order_name, may_rely_on_memory_order, returns_view
from exir_lowering.dynamo.aliases import on_host, sole_views
from exir_lowering.dynamo.capture import Captured, is_host_value, results_of
from exir_lowering.dynamo.host_calls import host_call, is_host_call

Boxed = Callable[[list[Any]], Any]
Calls = Callable[[LoweredBackendModule], Callable[..., Any]]


def assemble(captured: Captured, lowered: ExportedProgram | None, calls: Calls) -> Boxed:
    """Return the function that computes what a captured graph does; `lowered` is None if it has no program.

    `calls` returns what executes a partition, for the module that a delegate call calls.
    """
    return _Assembler(captured, calls).run(lowered)


@dataclass
class _Assembler:
    """Builds the function's graph: the inputs of the captured graph, the lowered program, then views of its results."""

    captured: Captured
    calls: Calls
    graph: Graph = field(default_factory=Graph)
    root: dict[str, Any] = field(default_factory=dict)
    env: dict[Node, Any] = field(default_factory=dict)

    def run(self, lowered: ExportedProgram | None) -> Boxed:
        source = self.captured.module.graph
        self.graph.set_codegen(boxed_code())
        for node in source.nodes:
            if node.op == "placeholder":
                self.env[node] = self.graph.placeholder(node.name)
        if lowered is not None:
            self._add_program(lowered)
        results = results_of(source)
        returned = {value: self._result(value) for value in results}
        if self.captured.name != "backward":
            for value in sole_views(results):
                returned[value] = self.graph.call_function(_no_view, (returned[value],))
        self.graph.output(tuple(returned[value] for value in results))
        module = GraphModule(self.root, self.graph)
        return module.forward

    def _add_program(self, lowered: ExportedProgram) -> None:
        placeholders = [node for node in lowered.graph.nodes if node.op == "placeholder"]
        users = iter(self.captured.inputs)
        body: dict[Node, Any] = {}
        for node, spec in zip(placeholders, lowered.graph_signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                body[node] = self.env[next(users)]
            elif spec.target in self.captured.lent:
                body[node] = self.env[self.captured.lent[str(spec.target)]]
            else:
                body[node] = self._constant(str(spec.target), _content(lowered, str(spec.target)))
        _copy_body(lowered.graph_module, self.graph, self.root, body, self.calls)
        returned = results_of(lowered.graph)
        for root, value, owned in zip(self.captured.roots, returned, _owned(returned), strict=True):
            self.env[root] = self._settle(root, body[value] if isinstance(value, Node) else value, owned)

    def _constant(self, target: str, value: Any) -> Node:
        name = target.replace(".", "_")
        self.root[name] = value
        return self.graph.get_attr(name)

    def _settle(self, root: Node, value: Any, owned: bool) -> Any:
        """Give a result the memory that AOTAutograd expects: its own, laid out as the captured graph's value."""
        expected = root.meta.get("val")
        if not isinstance(expected, torch.Tensor) or not isinstance(value, Node):
            return value
        if not owned:
            value = self.graph.call_function(torch.ops.aten.clone.default, (value,))
        sizes, strides = expected.shape, expected.stride()
        if all(isinstance(stride, int) for stride in strides) and (0 not in strides or 0 in sizes):
            return self.graph.call_function(_lay_out, (value, strides))
        return self.graph.call_function(_in_order, (value, dim_order(expected)))

    def _result(self, value: Any) -> Any:
        if not isinstance(value, Node) or value in self.env:
            return self.env.get(value, value) if isinstance(value, Node) else value
        if is_host_value(value):
            for source in value.all_input_nodes:
                self._result(source)
            self.env[value] = self.graph.node_copy(value, self.env.__getitem__)
        return self.env[value]


def _content(program: ExportedProgram, target: str) -> Any:
    return program.state_dict[target] if target in program.state_dict else program.constants[target]


def _copy_body(module: GraphModule, graph: Graph, root: dict[str, Any], body: dict[Node, Any], calls: Calls) -> None:
    """Copy the operators of a lowered graph to another one, in PyTorch's terms.

    `root` collects what the new graph's module will hold, and `body` the values; it has those of the inputs.
    """
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op == "get_attr":
            _copy_attribute(module, node, graph, root, body, calls)
            continue
        if graphs.is_delegate_call(node):
            called = graphs.attribute(module, str(node.args[0].target))
            arguments = torch.fx.map_arg(tuple(node.args[1:]), body.__getitem__)
            body[node] = graph.call_function(calls(called), arguments)
            continue
        relies = may_rely_on_memory_order(on_host(node.target))
        place = partial(_in_memory_order, graph, body) if relies else body.__getitem__
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), place)
        if is_host_call(node):
            body[node] = graph.call_function(host_call(node), args)
            continue
        body[node] = graph.call_function(on_host(node.target), args, kwargs)


def _in_memory_order(graph: Graph, body: Mapping[Node, Any], operand: Node) -> Any:
    """Return an operand as it lies in memory in its program, where views are copies, for an operator that relies on it.

    PyTorch's LSTM on the CPU takes for granted that its input is contiguous.
    """
    value = operand.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return body[operand]
    strides = value.stride()
    if all(isinstance(stride, int) for stride in strides):
        if 0 in strides:  # an input that repeats its elements, as it is given
            return body[operand]
        return graph.call_function(_lay_out, (body[operand], strides))
    return graph.call_function(_in_order, (body[operand], dim_order(value)))


def _copy_attribute(
    module: GraphModule, node: Node, graph: Graph, root: dict[str, Any], body: dict[Node, Any], calls: Calls
) -> None:
    value = graphs.attribute(module, str(node.target))
    if isinstance(value, LoweredBackendModule):
        return
    if isinstance(value, GraphModule):
        value = _nested(value, calls)
    name = f"held_{len(root)}"
    root[name] = value
    body[node] = graph.get_attr(name)


def _nested(module: GraphModule, calls: Calls) -> GraphModule:
    graph = Graph()
    root: dict[str, Any] = {}
    body: dict[Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            body[node] = graph.placeholder(node.name)
    _copy_body(module, graph, root, body, calls)
    graph.output(torch.fx.map_arg(module.graph.output_node().args[0], body.__getitem__))
    return GraphModule(root, graph)


def _owned(returned: Sequence[Any]) -> list[bool]:
    """Return which results have memory of their own: not an input's, not a constant's, and no earlier result's."""
    seen: set[Any] = set()
    found = []
    for value in returned:
        base = value
        while isinstance(base, Node) and _may_alias(base):
            base = base.args[0]
        found.append(isinstance(base, Node) and base not in seen and _makes_memory(base))
        seen.add(base)
    return found


def _may_alias(node: Node) -> bool:
    """Return whether what runs for a node of a lowered graph may return memory of its first argument."""
    if graphs.is_getitem(node):
        source: Any = node.args[0]
        return not graphs.is_delegate_call(source) and _may_alias(source)
    return node.op == "call_function" and returns_view(on_host(node.target))


def _makes_memory(node: Node) -> bool:
    maker: Any = node.args[0] if graphs.is_getitem(node) else node
    if graphs.is_delegate_call(maker):
        return True
    return maker.op == "call_function" and higher_order_name(maker.target) is None and not is_host_call(maker)


def _no_view(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same memory that is no view."""
    made = torch.empty(0, dtype=value.dtype)
    return made.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())


def _lay_out(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with these strides: the given one, or a copy that is no view, so that users may write into it."""
    if value.stride() == strides:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value)


def _in_order(value: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor whose dimensions lie in memory in an order, from outer to inner."""
    strides, step = [0] * len(order), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(value.shape[dim], 1)
    return _lay_out(value, tuple(strides))
