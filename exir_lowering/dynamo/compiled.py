"""An AOTAutograd graph as a Python function again: delegates run its partitions, PyTorch runs the rest.

The function has AOTAutograd's boxed convention: it takes its inputs in a list and empties it, so that an input that
nobody else has ends at its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node, map_arg

from exir_lowering import graphs
from exir_lowering._upstream.delegates import LoweredBackendModule
from exir_lowering._upstream.dynamo import boxed_code
from exir_lowering._upstream.fakes import dim_order
from exir_lowering._upstream.schemas import higher_order_name, may_rely_on_memory_order, returns_view
from exir_lowering.dynamo.aliases import on_host, sole_views
from exir_lowering.dynamo.capture import Captured, is_host_value, results_of
from exir_lowering.dynamo.higher_order import host_call, is_host_call
from exir_lowering.dynamo.partition_calls import Call, make_call
from exir_lowering.runtime.inputs import lay_out as lay_out_in_order

Boxed = Callable[[list[Any]], Any]


def compile_graph(
    captured: Captured, lowered: ExportedProgram | None, delegates: Mapping[str, Any], kept: Sequence[Any] = ()
) -> Boxed:
    """Make a captured graph callable, as `make_call` does its partitions; `kept` lives as long as it can be called."""
    calls: dict[int, Call] = {}

    def call(module: LoweredBackendModule) -> Call:
        if id(module) not in calls:
            calls[id(module)] = make_call(captured.name, len(calls), module, delegates)
        return calls[id(module)]

    run = partial(_assemble(captured, lowered, _Builder(call)).forward)
    run.kept = kept  # type: ignore[attr-defined]  # not in the module, which refers to itself and ends later
    return run


def _assemble(captured: Captured, lowered: ExportedProgram | None, builder: _Builder) -> GraphModule:
    """Build the function's graph: the inputs of the captured graph, the lowered program, then views of its results."""
    source, graph = captured.module.graph, builder.graph
    graph.set_codegen(boxed_code())
    builder.add_inputs(source)
    if lowered is not None:
        _add_program(captured, lowered, builder)
    results = results_of(source)
    returned = {value: _result(value, builder) if isinstance(value, Node) else value for value in results}
    if captured.name != "backward":
        for value in sole_views(results):
            returned[value] = graph.call_function(_no_view, (returned[value],))
    graph.output(tuple(returned[value] for value in results))
    return GraphModule(builder.root, graph)


def _add_program(captured: Captured, lowered: ExportedProgram, builder: _Builder) -> None:
    values = builder.values
    users = iter(captured.inputs)
    for node, spec in graphs.placeholders(lowered).items():
        target = str(spec.target)
        if spec.kind is InputKind.USER_INPUT:
            values[node] = values[next(users)]
        elif target in captured.baked:
            values[node] = values[captured.baked[target]]
        else:
            tables = lowered.state_dict if target in lowered.state_dict else lowered.constants
            values[node] = builder.hold(target.replace(".", "_"), tables[target])
    builder.add(lowered.graph_module)
    returned = results_of(lowered.graph)
    for root, value, owned in zip(captured.roots, returned, _owned(returned), strict=True):
        values[root] = _settle(builder, root, values[value], owned) if isinstance(value, Node) else value


def _settle(builder: _Builder, root: Node, value: Any, owned: bool) -> Any:
    """Give a result the memory that AOTAutograd expects: its own, laid out as the captured graph's value."""
    expected = root.meta.get("val")
    if not isinstance(expected, torch.Tensor) or not isinstance(value, Node):
        return value
    if not owned:
        value = builder.graph.call_function(torch.ops.aten.clone.default, (value,))
    repeats = _is_known(expected.stride()) and 0 in expected.stride() and 0 not in expected.shape
    return builder.lay_out(value, expected, by_strides=not repeats)


def _result(value: Node, builder: _Builder) -> Any:
    """Return a result of the captured graph, made of those of the program where it is a view."""
    if value not in builder.values and is_host_value(value):
        for source in value.all_input_nodes:
            _result(source, builder)
        builder.values[value] = builder.graph.node_copy(value, builder.values.__getitem__)
    return builder.values[value]


class _Builder:
    """Builds a graph of PyTorch's operators; `call` returns what executes the module of a delegate call."""

    def __init__(self, call: Callable[[LoweredBackendModule], Call]) -> None:
        self._call = call
        self.graph = Graph()
        self.root: dict[str, Any] = {}  # what the graph's module will hold
        self.values: dict[Node, Any] = {}  # by the nodes of other graphs, what they are in this one

    def add_inputs(self, source: Graph) -> None:
        for node in source.nodes:
            if node.op == "placeholder":
                self.values[node] = self.graph.placeholder(node.name)

    def hold(self, name: str, value: Any) -> Node:
        self.root[name] = value
        return self.graph.get_attr(name)

    def add(self, module: GraphModule) -> None:
        """Copy the operators of a lowered graph, whose inputs are there."""
        for node in module.graph.nodes:
            if node.op == "get_attr":
                value = graphs.attribute(module, str(node.target))
                if not isinstance(value, LoweredBackendModule):
                    value = self._nested(value) if isinstance(value, GraphModule) else value
                    self.values[node] = self.hold(f"held_{len(self.root)}", value)
            elif graphs.is_delegate_call(node):
                called = graphs.attribute(module, str(node.args[0].target))
                arguments = map_arg(tuple(node.args[1:]), self.values.__getitem__)
                self.values[node] = self.graph.call_function(self._call(called), arguments)
            elif node.op not in ("placeholder", "output"):
                self._add_operator(node)

    def _add_operator(self, node: Node) -> None:
        target = on_host(node.target)
        place = self._in_memory_order if may_rely_on_memory_order(target) else self.values.__getitem__
        args, kwargs = map_arg((node.args, node.kwargs), place)
        if is_host_call(node):
            target, kwargs = host_call(node), {}
        self.values[node] = self.graph.call_function(target, args, kwargs)

    def _in_memory_order(self, operand: Node) -> Any:
        """Return an operand as it lies in memory in its program, where views are copies, for what relies on that."""
        # PyTorch's LSTM on the CPU takes for granted that its input is contiguous.
        value, expected = self.values[operand], operand.meta.get("val")
        if not isinstance(expected, torch.Tensor):
            return value
        if _is_known(expected.stride()) and 0 in expected.stride():
            return value  # an input that repeats its elements, as it is given
        return self.lay_out(value, expected)

    def lay_out(self, value: Any, expected: torch.Tensor, *, by_strides: bool = True) -> Node:
        """Lay a value out as another one: with its strides, if they are known, or with its order of dimensions."""
        if by_strides and _is_known(expected.stride()):
            return self.graph.call_function(_lay_out, (value, expected.stride()))
        return self.graph.call_function(lay_out_in_order, (value, dim_order(expected)))

    def _nested(self, module: GraphModule) -> GraphModule:
        inner = _Builder(self._call)
        inner.add_inputs(module.graph)
        inner.add(module)
        inner.graph.output(map_arg(module.graph.output_node().args[0], inner.values.__getitem__))
        return GraphModule(inner.root, inner.graph)


def _is_known(strides: Sequence[Any]) -> bool:
    return all(isinstance(stride, int) for stride in strides)


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
