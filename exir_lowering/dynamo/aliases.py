"""Which nodes are views, and what the operators of Edge programs are in PyTorch."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.operators import wrapped_operator
from exir_lowering._upstream.schemas import returns_view, view_for_copy


def is_view(node: Node) -> bool:
    """Return whether a node's value shares memory with an argument, or is one value of such an operator."""
    if node.op != "call_function":
        return False
    if graphs.is_getitem(node):
        source = node.args[0]
        return isinstance(source, Node) and is_view(source)
    return returns_view(node.target)


def on_host(target: Any) -> Any:
    """Return the operator of PyTorch that computes what an operator of the Edge dialect does.

    A copy becomes the view that it is a copy of, as the program had it before its conversion.
    """
    return view_for_copy(wrapped_operator(target))
