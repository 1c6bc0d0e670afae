"""Which nodes are views, and what the operators of Edge programs are in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.operators import wrapped_operator
from exir_lowering._upstream.schemas import returns_view, view_for_copy

_RESHAPES = ("aten.view.default", "aten._unsafe_view.default")


def is_view(node: Node) -> bool:
    """Return whether a node's value shares memory with an argument, or is one value of such an operator."""
    if node.op != "call_function":
        return False
    if graphs.is_getitem(node):
        source = node.args[0]
        return isinstance(source, Node) and is_view(source)
    return returns_view(node.target)


def is_same_memory(node: Node) -> bool:
    """Return whether a node is an `as_strided` that changes nothing but the strides of dimensions of one element."""
    # PyTorch's pooling to one pixel ends so, if its input is in channels last.
    if graphs.operator_name(node) != "aten.as_strided.default" or not isinstance(node.args[0], Node):
        return False
    value, source = node.meta.get("val"), node.args[0].meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    strides = [
        pair
        for size, *pair in zip(value.shape, value.stride(), source.stride(), strict=False)
        if not (isinstance(size, int) and size == 1)
    ]
    pairs = [*zip(value.shape, source.shape, strict=False), *strides, (value.storage_offset(), source.storage_offset())]
    # Nothing is decided by symbolic sizes: their formulas have to be the same.
    return value.dim() == source.dim() and all(str(one) == str(other) for one, other in pairs)


def sole_views(results: Sequence[Any]) -> list[Node]:
    """Return the views among results that no other result shares memory with; PyTorch lets nobody write into them."""
    bases: dict[Node, list[Node]] = {}
    for value in dict.fromkeys(value for value in results if isinstance(value, Node)):
        *_, base = _chain(value)
        bases.setdefault(base, []).append(value)
    return [
        found[0] for base, found in bases.items() if found != [base] and len(found) == 1 and base.op != "placeholder"
    ]


def last_reshape(view: Node) -> Node | None:
    """Return the last view on the way to a view's base that only changes the shape; None if there is none."""
    views = (node for node in _chain(view) if node.op == "call_function")
    return next((node for node in views if graphs.operator_name(node) in _RESHAPES), None)


def _chain(value: Node) -> Iterator[Node]:
    """Yield a view, and what it is a view of, down to what is none."""
    yield value
    while is_view(value):
        value = value.args[0]  # type: ignore[assignment]
        yield value


def on_host(target: Any) -> Any:
    """Return PyTorch's operator for one of the Edge dialect; a copy becomes the view that it was in the program."""
    return view_for_copy(wrapped_operator(target))
