"""What is wrong in kernels of ExecuTorch's runtime that do run: each fault with what computes the same without it.

`tests/steps/legalizing/test_faults.py` has a reproduction of each, which fails when a release has mended it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.fakes import dim_order
from exir_lowering._upstream.operators import wrapped_operator
from exir_lowering.graphs.measures import tensors
from exir_lowering.steps.legalizing.registry import in_dtype
from exir_lowering.steps.legalizing.rules import RULES

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong in some kernels."""

    name: str
    operators: str  # without "aten."
    says: str  # a clause about the kernel
    applies: Callable[[Node], bool]
    cure: Callable[[Node], Callable[..., Any]]


def _dtypes(node: Node) -> set[torch.dtype]:
    read = (operand.meta.get("val") for operand in node.all_input_nodes)
    return {value.dtype for value in tensors([*read, node.meta.get("val")])}


def _in_half(node: Node) -> bool:
    return not _dtypes(node).isdisjoint(_HALF)


def _of_floats(node: Node) -> bool:
    return any(dtype.is_floating_point for dtype in _dtypes(node))


def _of_integers(node: Node) -> bool:
    return not _of_floats(node)


def _accumulates_in_half(node: Node) -> bool:
    return _in_half(node) and bool(graphs.argument(node, "accumulate"))


def _divides(node: Node) -> bool:
    mode = graphs.argument(node, "rounding_mode")
    return bool(mode == ("floor" if _of_floats(node) else "trunc"))


def _below_zero(node: Node) -> bool:
    bounds = [graphs.argument(node, name) for name in ("min", "max")]
    return _dtypes(node) == {torch.uint8} and any(isinstance(one, (int, float)) and one < 0 for one in bounds)


def _norms_badly(node: Node) -> bool:
    """Return whether a layer norm is over few elements, or in half precision: of more, the kernel updates a mean."""
    count = math.prod(size if type(size) is int else 0 for size in cast(Sequence[Any], node.args[1]))
    return _in_half(node) or count < _ROW


_ROW = 256


def _pools_nan(node: Node) -> bool:
    """Return whether what is pooled may be NaN: not if it is replaced where it is, or was a truth value."""
    pooled = cast(Node, node.args[0])
    name, read = graphs.operator_name(pooled), pooled.all_input_nodes
    if name == "aten.where.self" and graphs.operator_name(read[0]) == "aten.ne.Tensor":
        return {*read[0].args} != {pooled.args[2]}
    return _of_floats(node) and not (name.startswith("dim_order_ops.") and read[0].meta["val"].dtype is torch.bool)


def _is_complex(node: Node) -> bool:
    return any(dtype.is_complex for dtype in _dtypes(node))


def _need_not_wait(node: Node) -> bool:
    return bool(graphs.argument(node, "non_blocking"))


def _by(function: Callable[..., Any]) -> Callable[[Node], Callable[..., Any]]:
    return lambda _: function


def _by_rule(node: Node) -> Callable[..., Any]:
    return RULES[graphs.operator_name(node)]


def _in_float32(node: Node) -> Callable[..., Any]:
    return in_dtype(wrapped_operator(node.target), _HALF, torch.float32, node)


def _by_wide(function: Callable[..., Any]) -> Callable[[Node], Callable[..., Any]]:
    return lambda node: in_dtype(function, _HALF, torch.float32, node)


def _moments(x: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return a tensor without its mean and divided by its deviation, the mean, and one over the deviation."""
    mean = x.mean(dims, keepdim=True)
    rest = (x - mean).mean(dims, keepdim=True)  # what the kernel's mean, a plain sum, is off for large means
    mean = mean + rest
    apart = x - mean
    rstd = torch.rsqrt((apart * apart).mean(dims, keepdim=True) + eps)
    return apart * rstd, mean, rstd


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, inner: int = 0) -> Tensor:
    """Apply a weight and a bias, which lack so many inner dimensions; files have no views of weights in data files."""
    weight, bias = (each[(..., *[None] * inner)] if inner and each is not None else each for each in (weight, bias))
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _layer_norm(x: Tensor, shape: list[Any], weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    found, mean, rstd = _moments(x, list(range(-len(shape), 0)), eps)
    return _scaled(found, weight, bias), mean, rstd


def _of_layers(node: Node) -> Callable[..., Any]:
    """Leave half precision to torch's decomposition, which computes in float32."""
    half = cast(Node, node.args[0]).meta["val"].dtype in _HALF
    return _refused if half else _by_wide(_layer_norm)(node)


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: Any, c: Any, hxw: Any, group: int, eps: float
) -> Any:
    found, mean, rstd = _moments(x.reshape(n, group, -1), [-1], eps)
    affine = _scaled(found.reshape(x.shape), weight, bias, x.dim() - 2)
    return affine, mean.reshape(n, group), rstd.reshape(n, group)


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> Any:
    found, mean, rstd = _moments(x, [0, *range(2, x.dim())], eps)
    return _scaled(found, weight, bias, x.dim() - 2), mean.reshape(-1), rstd.reshape(-1)


def _max_pool(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    pool, nan = torch.ops.aten.max_pool2d_with_indices.default, x != x
    found, places = pool(torch.where(nan, float("-inf"), x), *args, **kwargs)
    inside, first = pool(nan.to(torch.float32), *args, **kwargs)
    return torch.where(inside > 0, float("nan"), found), torch.where(inside > 0, first, places)


def _broadcasts(node: Node) -> bool:
    first, second = (operand.meta["val"].shape for operand in cast(Sequence[Node], node.args))
    return bool(tuple(first) != tuple(second))


def _copied(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return x.to(dtype or x.dtype, copy=True)


def _becomes_complex(node: Node) -> bool:
    """Return whether a copy is complex, and what is copied is no float that has as many digits."""
    read, made = node.all_input_nodes[0].meta["val"].dtype, node.meta["val"].dtype
    return made.is_complex and not read.is_complex and read is not made.to_real()


def _to_complex(x: Tensor, *, dtype: torch.dtype, **_: Any) -> Tensor:
    return x.to(dtype.to_real()).to(dtype)


def _pool_backward(grad: Tensor, x: Tensor, *given: Any) -> Tensor:
    places, flat = given[-1].flatten(-2), torch.zeros_like(x).flatten(-2)
    return flat.scatter_add(-1, places, grad.flatten(-2)).reshape(x.shape)


def _lies_otherwise(node: Node) -> bool:
    """Return whether a result has another order in memory than the operand."""
    value = node.meta["val"]
    return dim_order(value) != tuple(range(value.dim()))


def _of_last(node: Node) -> Callable[..., Any]:
    """Transform the last dimension, whose results lie in memory as the kernel writes them."""
    run = wrapped_operator(node.target)

    def compute(x: Tensor, dims: Sequence[int], *rest: Any) -> Any:
        if len(dims) != 1:
            return NotImplemented
        return run(x.movedim(dims[0], -1).contiguous(), [x.dim() - 1], *rest).movedim(-1, dims[0])

    return compute


def _refused(*_: Any, **__: Any) -> Any:
    return NotImplemented


_ACCUMULATING = (
    "var.correction var_mean.correction cumsum.default convolution.default addmm.default linear.default "
    "avg_pool2d.default scatter_add.default _native_batch_norm_legit_no_training.default "
    "_native_batch_norm_legit.default native_batch_norm.default"
)
_REMAINDERS = "remainder.Tensor remainder.Scalar fmod.Tensor fmod.Scalar"
_POWERS = "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar"
_ROUNDINGS = "floor.default ceil.default trunc.default round.default"
_SHIFTS = "bitwise_left_shift.Tensor bitwise_right_shift.Tensor"
_COPY, _POOL = "_to_dim_order_copy.default", "max_pool2d_with_indices"
_SQUARES = "its variance is a difference of squares, which loses its digits for large means"

FAULTS = (
    Fault("half", _ACCUMULATING, "it accumulates in half precision, or overflows in it", _in_half, _in_float32),
    Fault("half index", "index_put.default", "it accumulates in half precision", _accumulates_in_half, _in_float32),
    Fault("layer norm", "native_layer_norm.default", f"{_SQUARES}, or in half precision",
          _norms_badly, _of_layers),
    Fault("group norm", "native_group_norm.default", _SQUARES, _of_floats, _by_wide(_group_norm)),
    Fault("batch norm", "_native_batch_norm_legit.no_stats", _SQUARES, _of_floats, _by_wide(_batch_norm)),
    Fault("remainder", _REMAINDERS, "it computes remainders of integers in floats, and with the sign of the dividend",
          _of_integers, _by_rule),
    Fault("division", "div.Tensor_mode div.Scalar_mode", "it divides integers in floats, and zero by zero to infinity",
          _divides, _by_rule),
    Fault("power", _POWERS, "it computes powers of integers in floats", _of_integers, _by_rule),
    Fault("whole", _ROUNDINGS, "it rounds integers in floats", _of_integers, _by_rule),
    Fault("shift", _SHIFTS, "it shifts by the remainder of what is negative or too large", _of_integers, _by_rule),
    Fault("mask", "masked_select.default", "its result has room for as many elements as its first operand has",
          _broadcasts, _by_rule),
    Fault("copy", _COPY, "it refuses a copy that need not wait", _need_not_wait, _by(_copied)),
    Fault("pool backward", f"{_POOL}_backward.default", "it leaves what no window chose as it was in memory",
          _of_floats, _by(_pool_backward)),
    Fault("transform", "_fft_r2c.default _fft_c2r.default", "it transforms only what lies in memory as its result does",
          _lies_otherwise, _of_last),
    Fault("copy to complex", _COPY, "it converts only some types of floats to complex numbers",
          _becomes_complex, _by(_to_complex)),
    Fault("complex", "full.default full_like.default", "it makes no complex numbers", _is_complex, _by(_refused)),
    Fault("sign", "sign.default", "the sign of NaN is NaN for it", _of_floats, _by_rule),
    Fault("clamp", "clamp.default", "it refuses negative bounds for uint8", _below_zero, _by_rule),
    Fault("max pool", f"{_POOL}.default", "it takes NaN for less than any number", _pools_nan, _by(_max_pool)),
)  # fmt: skip

_BY_OPERATOR: dict[str, list[Fault]] = {}
for _fault in FAULTS:
    for _name in _fault.operators.split():
        _BY_OPERATOR.setdefault(_name, []).append(_fault)


def find_fault(node: Node) -> Fault | None:
    """Return what is wrong in the kernel of a call; None if nothing is known."""
    namespace, _, name = graphs.operator_name(node).partition(".")
    found = _BY_OPERATOR.get(name, ()) if namespace in ("aten", "dim_order_ops") else ()
    return next((fault for fault in found if fault.applies(node)), None)
