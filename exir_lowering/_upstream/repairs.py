"""What fails in ExecuTorch on programs that are valid, put right while this thread converts or emits.

Orders of dimensions: strides that depend on data cannot be compared; a size that depends on data counts as large.

Bounds of sizes: those of intervals, which can be far too large, become exact ones; see `bounds`.

Views: memory is not shared between a value of fixed sizes and a view of it whose sizes are computed: that is a copy.

Types of arguments: what computes with sizes that depend on data cannot be run to look at them, and complex types are
in no table of types; which kernels compute with them is known elsewhere.

Functions of sizes: the verifier knows them under the names only that the emitter gives them later.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from executorch.exir import sym_util, tensor, tensor_layout
from executorch.exir.emit import _emitter as et_emitter  # all of these import the same function by its name
from executorch.exir.error import InternalError
from executorch.exir.passes import replace_view_copy_with_view_pass as viewing, sym_shape_eval_pass
from executorch.exir.passes.executorch_prim_ops_registry import _PYTHON_SYM_OPS_TO_EXECUTORCH_SYM_OPS
from executorch.exir.verification import verifier
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from exir_lowering._upstream.bounds import greatest
from exir_lowering._upstream.fakes import magnitude

Replacement = tuple[Any, str, Any]


def replacements(active: Callable[[], bool]) -> list[Replacement]:
    """Return what takes the place of what fails, for threads in which it is active."""
    return [*_orders(active), *_bounds(active), *_views(active)]


def _orders(active: Callable[[], bool]) -> list[Replacement]:
    def of(comparing: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @wraps(comparing)
        def dim_order_from_stride(stride: Any) -> Any:
            try:
                return comparing(stride)
            except GuardOnDataDependentSymNode:
                if not active():
                    raise
            return tuple(sorted(range(len(stride)), key=lambda dim: -magnitude(stride[dim])))

        return dim_order_from_stride

    name = "dim_order_from_stride"
    return [(one, name, of(getattr(one, name))) for one in (tensor, tensor_layout, et_emitter, viewing)]


def _bounds(active: Callable[[], bool]) -> list[Replacement]:
    bounding = sym_util.eval_upper_bound

    @wraps(bounding)
    def eval_upper_bound(size: Any) -> Any:
        known = active() and isinstance(size, torch.SymInt)
        bound = greatest(size.node.expr, size.node.shape_env.var_to_range) if known else None
        return bounding(size) if bound is None else bound

    return [(one, "eval_upper_bound", eval_upper_bound) for one in (sym_util, sym_shape_eval_pass)]


def _views(active: Callable[[], bool]) -> list[Replacement]:
    is_copy = viewing._is_view_copy

    @wraps(is_copy)
    def _is_view_copy(node: torch.fx.Node) -> bool:
        if not is_copy(node) or not active():
            return bool(is_copy(node))
        base: Any = node.args[0]
        spec = base.meta.get("spec")
        made = tensor.determine_tensor_dynanism(node.meta["val"].shape)
        return spec is None or spec.shape_dynamism == made

    return [(viewing, "_is_view_copy", _is_view_copy)]


def verifying_sizes() -> list[Replacement]:
    """Return what lets the verifier know the functions of sizes that are emitted, and sizes that depend on data."""
    known = {one for one in _PYTHON_SYM_OPS_TO_EXECUTORCH_SYM_OPS if isinstance(one, FunctionType)}

    class Validator(verifier.EdgeOpArgValidator):  # type: ignore[misc]
        violating_ops: Any

        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            before = dict(self.violating_ops)
            made = super().call_function(target, args, kwargs)
            types, _ = self.violating_ops.get(target, ({}, None))
            if any(dtype is not None and dtype.is_complex for dtype in types.values()):  # no table of types has them
                self.violating_ops = before
            return made

        def run_node(self, n: torch.fx.Node) -> Any:
            try:
                return super().run_node(n)
            except InternalError as error:  # raised where the result is computed, after the types were looked at
                if not isinstance(error.__cause__, GuardOnDataDependentSymNode):
                    raise
                return n.meta["val"]

    return [
        (verifier, "_EXECUTORCH_SYM_OPS", verifier._EXECUTORCH_SYM_OPS | known),
        (verifier, "EdgeOpArgValidator", Validator),
    ]
