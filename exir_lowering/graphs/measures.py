"""What it costs to compute a node and to hand over its result: operations and bytes, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.utils import flop_counter

from exir_lowering._upstream.fakes import size_hint
from exir_lowering._upstream.operators import operator_packet
from exir_lowering._upstream.tensors import SYMBOLS as SYMBOLS
from exir_lowering.errors import ignoring_errors
from exir_lowering.graphs import is_delegate_call, is_getitem

_MOVES_DATA = frozenset(
    {
        "_to_copy", "_to_dim_order_copy", "_clone_dim_order", "alias_copy", "arange", "as_strided_copy", "cat", "clone",
        "constant_pad_nd", "diagonal_copy", "embedding", "empty", "expand_copy", "fill", "flip", "full", "full_like",
        "gather", "index", "index_put", "index_select", "masked_fill", "narrow_copy", "ones", "ones_like",
        "permute_copy", "repeat", "roll", "scalar_tensor", "scatter", "select_copy", "select_scatter", "slice_copy",
        "slice_scatter", "split_copy", "split_with_sizes_copy", "squeeze_copy", "stack", "t_copy", "transpose_copy",
        "unbind_copy", "unfold_copy", "unsqueeze_copy", "view_copy", "where", "zeros", "zeros_like",
    }
)  # fmt: skip
"""Operators, by name without overload, that move or make data and compute nothing."""


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, such as a node's `meta["val"]`."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def same_sizes(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Return whether sizes, or strides, are equal whatever they are: `==` would make equality a condition."""
    return list(map(expression, one)) == list(map(expression, other))


def expression(size: Any) -> Any:
    """Return a size as an expression of sympy, or as the number that it is."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def elements(tensor: torch.Tensor) -> int:
    """Return the number of a tensor's elements; an unknown dimension counts with its size at export."""
    return math.prod(map(size_hint, tensor.shape))


def value_bytes(node: Node) -> int:
    """Return the bytes of a node's result, or of all its results; 0 for sizes and other numbers."""
    return sum(elements(tensor) * tensor.element_size() for tensor in tensors(node.meta.get("val")))


def value_elements(node: Node) -> int:
    """Return the number of elements of a node's result, or of all its results."""
    return sum(elements(tensor) for tensor in tensors(node.meta.get("val")))


def flops(node: Node) -> int:
    """Return the floating-point operations of a node: those of `torch.utils.flop_counter`, where it knows the operator.

    Operators that only move data count zero; all others count one for each element read or made, whichever is more.
    """
    if node.op != "call_function" or is_getitem(node) or is_delegate_call(node):
        return 0
    packet = operator_packet(node.target)
    name = getattr(packet, "__name__", "")
    if name in _MOVES_DATA:
        return 0
    if name == "linear":  # some partitioners keep it whole; torch's counter only knows its decomposition
        return 2 * value_elements(node) * size_hint(node.args[1].meta["val"].shape[-1])  # type: ignore[union-attr]
    formula = flop_counter.flop_registry.get(packet)
    results = list(tensors(node.meta.get("val")))
    if formula is not None:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda read: _sized_values(read.meta.get("val")))
        with ignoring_errors():  # torch's formula may not know this form of the operator
            return int(formula(*args, **kwargs, out_val=_sized_values(node.meta.get("val"))))
    read = [tensor for source in node.all_input_nodes for tensor in tensors(source.meta.get("val"))]
    return max((elements(tensor) for tensor in (*results, *read)), default=0) if results else 0


def _sized_values(value: Any) -> Any:
    """Replace tensors by tensors on the meta device, whose sizes are plain numbers."""
    if isinstance(value, torch.Tensor):
        return torch.empty([size_hint(size) for size in value.shape], dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_sized_values(item) for item in value)
    return size_hint(value) if isinstance(value, torch.SymInt) else value
