"""Layers: the operators that were quantised, each with what follows it in one kernel, and how to undo one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from exir_lowering import graphs
from exir_lowering.quantization.exporting import Place


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """An operator in int8."""

    name: str  # of its node
    output: str  # the node that has its result: the activation after it, if one kernel does both
    path: str  # of its module
    operator: str
    weights: Mapping[int, torch.Tensor]  # in float, by the operand that each is


@dataclass(frozen=True, slots=True)
class Layers:
    """What a quantizer asked for."""

    all: tuple[Layer, ...]
    names: Mapping[Place, str]  # what the weights in int8 were called
    reading: frozenset[str]  # the nodes that want their operands in int8
    writing: frozenset[str]  # the nodes that want their result in int8


def find_layers(prepared: GraphModule) -> Layers:
    """Return the layers of a graph with observers."""
    found, names, reading, writing = [], {}, set(), set()
    for node in prepared.graph.nodes:
        annotation: Any = node.meta.get("quantization_annotation")
        if node.op != "call_function" or annotation is None:
            continue
        if annotation.output_qspec is not None:
            writing.add(node.name)
        if not annotation.input_qspec_map:
            continue
        reading.add(node.name)
        weights = {}
        for index, operand in enumerate(node.args):
            source = operand.args[0] if isinstance(operand, Node) and operand.op == "call_module" else None
            if isinstance(source, Node) and source.op == "get_attr":
                names[node.name, index] = str(source.target)
                weights[index] = graphs.attribute(prepared, str(source.target))
        if any(hasattr(spec, "dtype") for spec in annotation.input_qspec_map.values()):
            output = _following(node) if annotation.output_qspec is None else node
            path, operator = graphs.module_stack(node), graphs.operator_name(node)
            found.append(Layer(node.name, output.name, path, operator, weights))
    return Layers(tuple(found), names, frozenset(reading), frozenset(writing))


def _following(node: Node) -> Node:
    """Return the activation that is computed with an operator, or the operator."""
    user = next(iter(node.users))
    annotation: Any = user.meta.get("quantization_annotation")
    alone = len(node.users) == 1 and annotation is not None and annotation.output_qspec is not None
    return user if alone and not annotation.input_qspec_map else node


class Run(Interpreter):
    """Runs a graph, and shows the value of each operator; observers observe nothing, so that it computes in float."""

    def __init__(self, module: GraphModule, watch: Callable[[Node, Any], None]) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self._watch = watch

    def run_node(self, n: Node) -> Any:
        """Run a node."""
        result = super().run_node(n)
        if n.op == "call_function":
            self._watch(n, result)
        return result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass a value on as an observer does."""
        return args[0]


@contextlib.contextmanager
def in_float(module: GraphModule, layer: Layer, layers: Layers) -> Iterator[None]:
    """Let a layer of a quantised graph compute in float, as if nobody had asked to quantise it."""
    nodes = {node.name: node for node in module.graph.nodes}
    operator, output = nodes[layer.name], nodes[layer.output]
    float_weights: dict[Node, Node] = {}
    for index, weight in layer.weights.items():
        setattr(module, f"_float_{index}", weight)
        with module.graph.inserting_before(operator):
            float_weights[operator.args[index]] = module.graph.get_attr(f"_float_{index}")

    def before(operand: Node) -> Node:
        source = float_weights.get(operand) or _source(operand)
        return operand if source is None or source.name in layers.writing else source

    rounded = [each for quantize in output.users for each in quantize.users if _source(each) is output]
    readers = [user for each in rounded for user in each.users if user.name not in layers.reading]
    changed = {node: (node.args, node.kwargs) for node in (operator, *readers)}
    operator.args = torch.fx.map_arg(operator.args, before)
    for user in readers:
        user.args, user.kwargs = torch.fx.map_arg(
            (user.args, user.kwargs), lambda operand: output if operand in rounded else operand
        )
    try:
        yield
    finally:
        for node, (args, kwargs) in changed.items():
            node.args, node.kwargs = args, kwargs
        for index, node in zip(layer.weights, float_weights.values(), strict=True):
            module.graph.erase_node(node)
            delattr(module, f"_float_{index}")


def _source(node: Node) -> Node | None:
    """Return what was rounded to int8 and back, where a node is that."""
    if node.op != "call_function" or ".dequantize" not in graphs.operator_name(node):
        return None
    rounded: Any = node.args[0]
    return rounded.args[0] if rounded.op == "call_function" else None
