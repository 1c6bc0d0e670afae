"""Passes of ExecuTorch's conversion to Edge dialect that get something wrong, put right while this thread converts.

Numbers: the pass makes tensors of Python numbers, which take part in what torch promotes: beside an int32 without
dimensions, 1 makes the result an int64, and 0.1 beside a float64 loses half of its digits. Such numbers become tensors
of the dtype that the operator computes in.

Empty tensors: where all that is concatenated is empty, the pass writes sizes that are not known into the graph as if
they were numbers. (ExecuTorch's kernel would skip what is empty.) Operators compute such sizes.

Constants: they become inputs of the graph, of which there is a list; where there is no user input before which they
could stand, the graph has them in reverse order.
"""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from executorch.exir.pass_base import ProxyValue, map_args  # what a pass sees of values
from executorch.exir.passes import PruneEmptyTensorsPass, ScalarToTensorPass
from executorch.exir.program import _program  # which calls what makes inputs of constants by its name there
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes  # what operators compute in
from torch.export import ExportedProgram
from torch.utils._python_dispatch import _disable_current_modes  # tensors that are constants, whatever mode torch is in

from exir_lowering._upstream import pins, repairs
from exir_lowering._upstream.locks import during, replacing

_mending: ContextVar[str] = ContextVar("exir_lowering_mending_passes", default="")  # "all", "failures", "" for nothing


def mended_passes() -> str:
    """Return what this thread puts right: "all", "failures", or ""."""
    return _mending.get()


def mending_passes(*, numbers: bool = True) -> AbstractContextManager[str]:
    """Put the known passes right for what this thread converts; without `numbers` only where they fail."""
    return during(_mending, "all" if numbers else "failures", _MENDING)


def _replacements() -> list[tuple[Any, str, Any]]:
    lifting = _program.lift_constant_tensor_pass

    @wraps(lifting)
    def lift_constant_tensor_pass(program: Any) -> Any:
        lifted = lifting(program)
        return _in_order(lifted) if _mending.get() else lifted

    return [
        (_program, "lift_constant_tensor_pass", lift_constant_tensor_pass),
        *([_with_exact_numbers()] if pins.is_on("scalar operands") else []),
        *([_with_empty_concatenations()] if pins.is_on("empty concatenations") else []),
        *repairs.replacements(lambda: bool(_mending.get())),
    ]


def lift_constants(program: ExportedProgram) -> ExportedProgram:
    """Make the attributes of a graph that are tensors inputs, as ExecuTorch does, in order."""
    return _in_order(_program.lift_constant_tensor_pass(program))


def _in_order(program: ExportedProgram) -> ExportedProgram:
    """Give the inputs of a graph the order of the list, if it has another one."""
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    names = [spec.arg.name for spec in program.graph_signature.input_specs]
    if list(nodes) != names and sorted(nodes) == sorted(names):
        body = next(node for node in program.graph.nodes if node.op != "placeholder")
        for name in names:
            body.prepend(nodes[name])
    return program


def _with_exact_numbers() -> tuple[Any, str, Any]:
    calling = ScalarToTensorPass.call_operator

    @wraps(calling)
    def call_operator(self: Any, op: Any, args: Any, kwargs: Any, meta: Any) -> Any:
        if _mending.get() == "all":
            args, kwargs = _with_exact(self, op, args, kwargs)
        return calling(self, op, args, kwargs, meta)

    return ScalarToTensorPass, "call_operator", call_operator


def _with_empty_concatenations() -> tuple[Any, str, Any]:
    pruning = PruneEmptyTensorsPass.remove_empty_tensors_from_cat

    @wraps(pruning)
    def remove_empty_tensors_from_cat(self: Any, graph_module: Any, cat_node: Any) -> None:
        sizes = cat_node.meta["val"].shape
        known = [size for size in sizes if isinstance(size, int)]
        if _mending.get() and 0 in known and len(known) < len(sizes):
            _make_empty(cat_node)
        else:
            pruning(self, graph_module, cat_node)

    return PruneEmptyTensorsPass, "remove_empty_tensors_from_cat", remove_empty_tensors_from_cat


def _make_empty(cat_node: torch.fx.Node) -> None:
    """Replace a concatenation without elements by an empty tensor, whose sizes are computed."""
    value = cat_node.meta["val"]
    operands: Any = cat_node.args[0]
    # torch skips those of shape (0).
    whole = [operand for operand in operands if operand.meta["val"].dim() == value.dim()]
    given: Any = cat_node.args[1] if len(cat_node.args) > 1 else cat_node.kwargs.get("dim", 0)
    along = given % value.dim()

    def call(target: Any, args: Any, made: Any) -> Any:
        if isinstance(made, int):
            return made
        with cat_node.graph.inserting_before(cat_node):
            node = cat_node.graph.call_function(target, args)
        node.meta = {**cat_node.meta, "val": made}
        return node

    def size(operand: torch.fx.Node, dim: int) -> Any:
        return call(torch.ops.aten.sym_size.int, (operand, dim), operand.meta["val"].shape[dim])

    sizes = [size(whole[0], dim) for dim in range(value.dim())]
    total = whole[0].meta["val"].shape[along]
    for operand in whole[1:]:
        total = total + operand.meta["val"].shape[along]
        sizes[along] = call(operator.add, (sizes[along], size(operand, along)), total)
    full = call(torch.ops.aten.full.default, (sizes, 0), value)
    full.kwargs = {"dtype": value.dtype}
    cat_node.replace_all_uses_with(full)


def _with_exact(running: Any, op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return operands whose numbers are tensors where a tensor that torch makes of them would change the result."""
    operands: list[Any] = []
    map_args(op, lambda value, arg: operands.append(value) if _is_tensor(arg) else None, args, kwargs)
    tensors = [value.to_tensor() for value in operands if isinstance(value, ProxyValue) and value.is_tensor()]
    if not tensors or not any(map(_is_number, operands)):
        return args, kwargs
    running._modified = True

    def exact(value: Any, arg: Any) -> Any:
        if not (_is_tensor(arg) and _is_number(value)):
            return value
        with _disable_current_modes():
            usual = torch.tensor(value)
            dtype = _promoted(*tensors, value)
            digits = dtype is torch.float64 and usual.item() != value
            if not digits and dtype is _promoted(*tensors, usual):
                return value
            # A whole number that is too large wraps around.
            return torch.tensor(value, dtype=dtype) if dtype.is_floating_point else usual.to(dtype)

    changed: tuple[Any, Any] = map_args(op, exact, args, kwargs)
    return changed


def _promoted(*operands: Any) -> torch.dtype:
    _, dtype = elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    return dtype


def _is_tensor(arg: Any) -> bool:
    return isinstance(arg.type, torch.TensorType)


def _is_number(value: Any) -> bool:
    return isinstance(value, (float, int, bool))


_MENDING = replacing(_replacements)
