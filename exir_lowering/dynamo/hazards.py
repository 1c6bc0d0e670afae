"""What keeps a graph of AOTAutograd from being lowered: what the Edge dialect cannot say, or what would be wrong."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from exir_lowering import graphs
from exir_lowering._upstream.fakes import FakeTensor
from exir_lowering._upstream.schemas import higher_order_name
from exir_lowering._upstream.trees import pytree
from exir_lowering.dynamo.aliases import is_same_memory
from exir_lowering.dynamo.higher_order import LOWERED

_BY_STRIDE = ("aten.as_strided", "aten.set_", "aten.sym_stride", "aten.sym_storage_offset", "aten._reshape_alias")
"""The beginnings of the names of operators that see how a tensor lies in memory, which may be otherwise here."""


class NotLowered(Exception):
    """A graph, or a part of it, is left to PyTorch: `reason` says why, in a clause. No `node`: the whole graph."""

    def __init__(self, reason: str, node: Node | None = None) -> None:
        where = graphs.source_code(node).rstrip(".") if node is not None else ""
        super().__init__(f"{reason}. {where}" if where else reason)
        self.reason, self.node = reason, node


class UnboundedSizes(NotLowered):
    """A partition has symbolic sizes, and what executes it has to know them."""


def check(module: GraphModule, entering: Container[Node]) -> None:
    """Check that a graph can be lowered; NotLowered if not.

    The nodes that are not entering its program are views, which PyTorch makes of inputs and of results that have the
    memory they are expected to have, or are not used.
    """
    for node in module.graph.nodes:
        if node in entering and is_same_memory(node):
            continue  # the program has its argument instead
        if node in entering:
            _check_node(module, node)
            for nested in graphs.nested_graphs(module, node):
                for _, inner in graphs.walk(nested.module):
                    for one in inner.graph.nodes:
                        _check_node(inner, one)
        elif node.op in ("call_module", "call_method") or (node.op == "call_function" and node.is_impure()):
            raise NotLowered(f"{graphs.operator_name(node)} does something, but returns nothing that is used", node)


def _check_node(module: GraphModule, node: Node) -> None:
    for value in pytree.tree_leaves(node.meta.get("val")):
        _check_value(node, value)
    if node.op == "get_attr":
        value = graphs.attribute(module, str(node.target))
        if not isinstance(value, (torch.Tensor, GraphModule)):
            raise NotLowered(f"it holds a {type(value).__name__}, which a program cannot", node)
        if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise NotLowered(f"it holds a {type(value).__name__}, a tensor subclass", node)
    if node.op in ("call_module", "call_method"):
        raise NotLowered(f"it has a {node.op}", node)
    if node.op != "call_function":
        return
    name = graphs.operator_name(node)
    nested = higher_order_name(node.target)
    if nested is not None:
        if nested not in LOWERED:
            raise NotLowered(f"the higher-order operator {nested} is not lowered", node)
        return
    if graphs.is_mutating(node):
        raise NotLowered(f"{name} writes into its arguments", node)
    if name.startswith(_BY_STRIDE) and not all(map(_lies_plainly, node.all_input_nodes)):
        raise NotLowered(f"{name} depends on how a tensor lies in memory", node)


def _lies_plainly(node: Node) -> bool:
    """Return whether a value is an input that has its memory alone and in order, as partitions get it."""
    value = node.meta.get("val")
    if node.op != "placeholder" or not isinstance(value, torch.Tensor):
        return node.op == "placeholder"
    if not all(isinstance(number, int) for number in (*value.shape, *value.stride(), value.storage_offset())):
        return False
    whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
    return whole and value.storage_offset() == 0 and value.is_contiguous()


def _check_value(node: Node, value: Any) -> None:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        if free_unbacked_symbols(value):
            raise NotLowered("it has sizes that depend on data", node)
        return
    if not isinstance(value, torch.Tensor):
        return
    if type(value) is not FakeTensor:
        raise NotLowered(f"{node.name} is a {type(value).__name__}, a tensor subclass", node)
    if value.device.type != "cpu":
        raise NotLowered(f"{node.name} is on the device {value.device}, not on the CPU", node)
    if value.layout is not torch.strided:
        raise NotLowered(f"{node.name} has the layout {value.layout}", node)
    if value.is_quantized or value.dtype.is_complex:
        raise NotLowered(f"{node.name} has the dtype {value.dtype}", node)
    if free_unbacked_symbols(value):
        raise NotLowered("it has sizes that depend on data", node)
