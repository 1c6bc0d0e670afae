"""Edge operators by distinct calls: the same as ExecuTorch's passes from core ATen, each of which retraces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig
from executorch.exir.passes.dim_order_ops_registry import DimOrderOpsMap
from executorch.exir.passes.remove_noop_pass import _DEQUANT_OPS, _QUANT_OPS, eliminate_dq_q
from executorch.exir.passes.replace_aten_with_edge_pass import aten_to_edge, should_lower_to_edge
from torch._export.passes.replace_view_ops_with_view_copy_ops_pass import get_view_copy_of_view_op
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import _Namespace

from exir_lowering._upstream import pins
from exir_lowering._upstream.legalizing import dialect_passes
from exir_lowering._upstream.operators import is_overload, list_arguments, mutates_arguments, packet_name
from exir_lowering._upstream.passes import mended_passes
from exir_lowering._upstream.programs import lazy_graph_module
from exir_lowering.fast.inplace import FUNCTIONALIZED
from exir_lowering.fast.rewriter import Plain, Stage, rewrite
from exir_lowering.fast.templates import SYMBOLIC_OPERATORS

_ATEN = torch.ops.aten
_PRUNING = "executorch.exir.passes.prune_empty_tensors_pass:PruneEmptyTensorsPass.remove_empty_tensors_from_cat"
ASSERT_METADATA = _ATEN._assert_tensor_metadata.default
# Operators that a pass treats by name.
_LOOKED_AT = frozenset(
    {
        *(ASSERT_METADATA, _ATEN._unsafe_view.default, _ATEN.cat.default),
        *(_ATEN.slice_copy.Tensor, _ATEN.to.dtype),
    }
)
# Operators whose operands a pass converts to one dtype.
_PROMOTED = frozenset(
    {
        *(_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor),
        *(_ATEN.div.Tensor, _ATEN.div.Tensor_mode, _ATEN.minimum.default),
    }
)


class Dialect(Stage):
    """The stage that replaces core ATen operators by those of Edge dialect, with gradients, as ExecuTorch's passes."""

    name = "edge"
    gradients = True
    decomposes = False

    def __init__(self, config: EdgeCompileConfig) -> None:
        self._config = config
        self._plain: dict[Any, Plain | None] = {}
        self._by_name = pins.is_on("Edge operators by name")
        pruning = pins.find(_PRUNING)
        # What unknown passes do is remembered for nobody else: they may be others the next time.
        passes = getattr(pruning, "__code__", pruning) if self._by_name else object()
        self.key = ("edge", bool(config._skip_dim_order), passes, mended_passes())

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
        if target in _PROMOTED:
            kinds = {value.dtype for value in values if isinstance(value, torch.Tensor)}
            of_one_float = len(kinds) == 1 and kinds.pop().is_floating_point
            if not of_one_float or not all(isinstance(argument, Node) for argument in node.args):
                return None
        return plain

    def apply(self, graph: Graph) -> GraphModule:
        """Convert calls by ExecuTorch's passes."""
        converted: GraphModule = lazy_graph_module({}, graph)
        for step in dialect_passes(self._config):
            converted = step(converted).graph_module
        return converted


def _replaced_only(target: Any) -> Plain | None:
    """Return the Edge operator of one that passes only replace, whatever its operands are."""
    if not is_overload(target):
        return Plain(target, same=True) if target in SYMBOLIC_OPERATORS or target is FUNCTIONALIZED else None
    if target in _LOOKED_AT or mutates_arguments(target):
        return None
    copying: Any = target
    if target.is_view or any(argument.aliased for argument in list_arguments(target)):
        copying = get_view_copy_of_view_op(target._schema)
        if copying is None or copying in _LOOKED_AT:
            return None
    edge = aten_to_edge(copying) if should_lower_to_edge(copying) else copying
    return None if edge in DimOrderOpsMap else Plain(edge, same=copying is target)


def _has_number_for_tensor(node: Node) -> bool:
    """Return whether a call has a number where its operator has a tensor: a pass makes a constant of it."""
    for index, argument in enumerate(list_arguments(node.target) if is_overload(node.target) else ()):
        if argument.type == "Tensor":
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            if not isinstance(value, Node) or not isinstance(value.meta.get("val"), torch.Tensor):
                return True
    return False


def to_edge_operators(graph_module: GraphModule, config: EdgeCompileConfig) -> GraphModule:
    """Return a graph with Edge operators for core ATen ones, as ExecuTorch makes it; or NotCoveredError."""
    converted = rewrite(graph_module, Dialect(config))
    if graph_module.graph.find_nodes(op="call_function", target=ASSERT_METADATA):
        # The first pass removes these; the last one traces, and names, what is left without what only they read.
        names = converted.graph._graph_namespace = _Namespace()
        for node in converted.graph.nodes:
            made = converted.graph._target_to_str(node.target) if node.op == "call_function" else node.name
            node.name = names.create_name(packet_name(node.target) or made, node)
    # Pairs that dequantize and quantize again with the same parameters go: the one thing that spans two calls.
    calls = [node for node in converted.graph.nodes if node.op == "call_function"]
    pairs = [node for node in calls if node.target in _DEQUANT_OPS]
    if any(user.target in _QUANT_OPS for node in pairs for user in node.users):
        eliminate_dq_q(converted, pairs)
        converted.graph.eliminate_dead_code()
    for node in converted.graph.nodes:
        if node.op == "call_function":
            value = node.meta["val"]  # ExecuTorch's passes keep a place for what has no fake tensor
            node.meta["tensor_meta"] = type(value)([None] * len(value)) if isinstance(value, (list, tuple)) else None
    return converted
