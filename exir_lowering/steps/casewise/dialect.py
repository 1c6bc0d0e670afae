"""Edge operators by cases: the same as ExecuTorch's passes from core ATen to Edge dialect, each of which retraces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig
from torch.fx import Graph, GraphModule, Node

from exir_lowering._upstream import conversion, pins
from exir_lowering._upstream.operators import is_overload, list_arguments, writes
from exir_lowering._upstream.programs import lazy_graph_module
from exir_lowering.steps.casewise.by_template import Plain, Stage, rewrite

_ATEN = torch.ops.aten
_LOOKED_AT = frozenset(
    {
        conversion.ASSERT_METADATA,
        torch.ops.aten._unsafe_view.default,
        _ATEN.cat.default,
        _ATEN.slice_copy.Tensor,
        _ATEN.to.dtype,
    }
)
"""Operators that a pass treats by name."""

_PROMOTED = frozenset(
    {
        *(_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor),
        *(_ATEN.div.Tensor, _ATEN.div.Tensor_mode, _ATEN.minimum.default),
    }
)
"""Operators whose operands a pass converts to one dtype."""


class Dialect(Stage):
    """The stage that replaces core ATen operators by those of Edge dialect, with gradients, as ExecuTorch's passes."""

    name = "edge"
    gradients = True
    decomposes = False

    def __init__(self, config: EdgeCompileConfig) -> None:
        self._config = config
        self._plain: dict[Any, Plain | None] = {}
        self._by_name = pins.is_on("Edge operators by name")
        # What unknown passes do is remembered for nobody else: they may be others the next time.
        self.key = ("edge", conversion.skips_dim_order(config), None if self._by_name else object())

    def plain(self, node: Node, values: Sequence[Any]) -> Plain | None:
        """Return the Edge operator of a call that no pass changes otherwise."""
        target = node.target
        if not self._by_name:
            return None
        if target not in self._plain:
            self._plain[target] = _replaced_only(target)
        plain = self._plain[target]
        if plain is None or _has_number_for_tensor(node):
            return None
        if target in _PROMOTED and not _all_of_one_float(values, node):
            return None
        return plain

    def apply(self, graph: Graph) -> GraphModule:
        """Convert cases by ExecuTorch's passes."""
        converted: GraphModule = lazy_graph_module({}, graph)
        for step in conversion.dialect_passes(self._config):
            converted = step(converted).graph_module
        return converted


def _replaced_only(target: Any) -> Plain | None:
    """Return the Edge operator of one that passes only replace, whatever its operands are."""
    if not is_overload(target):
        return Plain(target, same=True) if target in conversion.SYMBOLIC_OPERATORS else None
    if target in _LOOKED_AT or writes(target):
        return None
    copying: Any = target
    if target.is_view or any(argument.aliased for argument in list_arguments(target)):
        copying = conversion.view_copy_of(target)
        if copying is None or copying in _LOOKED_AT:
            return None
    edge = conversion.aten_to_edge(copying) if conversion.should_lower_to_edge(copying) else copying
    return None if edge in conversion.DIM_ORDER_OPERATORS else Plain(edge, same=copying is target)


def _has_number_for_tensor(node: Node) -> bool:
    """Return whether a call has a number where its operator has a tensor: a pass makes a constant of it."""
    if not is_overload(node.target):
        return False
    for index, argument in enumerate(list_arguments(node.target)):
        if argument.type == "Tensor":
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            if not isinstance(value, Node) or not isinstance(value.meta.get("val"), torch.Tensor):
                return True
    return False


def _all_of_one_float(values: Sequence[Any], node: Node) -> bool:
    kinds = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    tensors_only = all(isinstance(argument, Node) for argument in node.args)
    return tensors_only and len(kinds) == 1 and kinds.pop().is_floating_point


def to_edge_operators(graph_module: GraphModule, config: EdgeCompileConfig) -> GraphModule:
    """Return a graph with Edge operators for core ATen ones, as ExecuTorch makes it; Uncovered if not by cases."""
    converted = rewrite(graph_module, Dialect(config))
    _fold_requantized(converted)
    for node in converted.graph.nodes:
        if node.op == "call_function":
            value = node.meta["val"]  # ExecuTorch's passes keep a place for what has no fake tensor
            node.meta["tensor_meta"] = type(value)([None] * len(value)) if isinstance(value, (list, tuple)) else None
    return converted


def _fold_requantized(graph_module: GraphModule) -> None:
    """Remove pairs that dequantize and quantize again with the same parameters: the one thing that spans two calls."""
    pairs = [
        node for node in graph_module.graph.nodes if node.op == "call_function" and node.target in conversion.DEQUANTIZE
    ]
    if any(user.target in conversion.QUANTIZE for node in pairs for user in node.users):
        conversion.eliminate_dq_q(graph_module, pairs)
        graph_module.graph.eliminate_dead_code()
