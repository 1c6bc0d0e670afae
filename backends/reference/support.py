"""What the reference backend takes: every operator that its delegate can execute. For others, it gives the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from exir_lowering import Partitioner, graphs
from exir_lowering.backends.reference.operators import EDGE, HIGHER_ORDER
from exir_lowering.graphs import measures
from exir_lowering.graphs.operators import functions, pure as pure_operators
from exir_lowering.graphs.serialized import NotSerialisableError
from exir_lowering.graphs.serialized.plain import PlainWriter
from exir_lowering.partitioners import GraphScope, No, Support, SupportPartitioner

_NAMES = {id(function): name for name, function in functions.FUNCTIONS.items()}
_ARGUMENTS = PlainWriter()
_ARGUMENTS.writers[Node] = lambda node, depth: None


def reference_partitioner(*, own_state: bool = True) -> Partitioner:
    """Return a partitioner that gives the reference backend everything that its delegate can execute.

    Args:
        own_state: Whether a buffer that only one partition reads and writes moves into it. State in a delegate belongs
            to one method: what several methods share, such as the KV cache of a prefill and a decode method, stays
            with the runtime. Give False if it is to be shared by name (`emit(share_state=True)`).
    """
    return SupportPartitioner({"reference": ReferenceSupport()}, own_state=own_state)


def executable() -> Support:
    """Support what the reference delegate can execute.

    Returns:
        The support, for a partitioner of your own.
    """
    return ReferenceSupport()


class ReferenceSupport(Support):
    """Supports functional operators on CPU tensors, arithmetic on sizes, and control flow over such operators."""

    def bind(self, scope: GraphScope) -> Callable[[Node], No | None]:
        """Prepare for one graph."""

        def check(node: Node) -> No | None:
            no = refusal(scope.graph_module, node)
            return No(no[0], no[1], "reference") if no is not None else None

        return check

    def __str__(self) -> str:
        return "reference"


def function_name(target: Any) -> str:
    """Return an operator's name in a payload."""
    return _NAMES.get(id(target)) or graphs.target_name(target)


def refusal(module: GraphModule, node: Node) -> tuple[str, str] | None:
    """Return why the delegate cannot execute a node, as a code and a text; None if it can."""
    no = _operator_refusal(node) or _argument_refusal(node) or _tensor_refusal(node)
    if no is not None:
        return no
    for nested in graphs.nested_graphs(module, node):
        for inner in nested.module.graph.nodes:
            if inner.op == "call_function" and (no := refusal(nested.module, inner)) is not None:
                return no[0], f"its graph {nested.name} has {graphs.operator_name(inner)}: {no[1]}"
    return None


def _operator_refusal(node: Node) -> tuple[str, str] | None:
    name = function_name(node.target)
    if id(node.target) in _NAMES or name in EDGE or (name in HIGHER_ORDER and node.target in graphs.OPERAND_LAYOUTS):
        return None
    if graphs.is_delegate_call(node):
        return "op", "it calls another delegate"
    if name.count(".") < 2:
        kind = "higher-order operator" if hasattr(torch.ops.higher_order, name) else "Python function"
        return "op", f"the delegate does not have the {kind} {name}"
    if name not in _registered(name):
        return "op", f"{name} is not registered in torch"
    if graphs.is_mutating(node):
        return "op", f"{name} writes into its arguments; the delegate executes functional operators"
    if pure_operators.find(name) is None:
        return "op", pure_operators.why_not(name)
    return None


def _registered(name: str) -> frozenset[str]:
    """Return the operators that torch knows, including those of libraries that were imported later."""
    known = graphs.known_operators()
    if name not in known:
        graphs.known_operators.cache_clear()
        known = graphs.known_operators()
    return known


def _argument_refusal(node: Node) -> tuple[str, str] | None:
    for value in (*node.args, *node.kwargs.values()):
        if isinstance(value, torch.device) and value.type != "cpu":
            return "argument", f"it makes a tensor on device {value}; the delegate executes on the CPU"
        try:
            _ARGUMENTS.write(value)
        except NotSerialisableError:
            return "argument", f"an argument of type {type(value).__name__} ({value!r}) cannot be written to a payload"
    return None


def _tensor_refusal(node: Node) -> tuple[str, str] | None:
    for source in (*node.all_input_nodes, node):
        for tensor in measures.tensors(source.meta.get("val")):
            if tensor.layout is not torch.strided or tensor.is_quantized:
                return "layout", f"{source.name} is {tensor.layout}, supported: dense tensors"
            if tensor.device.type != "cpu":
                return "device", f"{source.name} is on device {tensor.device}; the delegate executes on the CPU"
    return None
