"""What is wrong in kernels of ExecuTorch's runtime that do run: each fault with what computes the same without it.

`tests/steps/legalizing/test_faults.py` has a reproduction of each, which fails when a release has mended the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.fakes import dim_order
from exir_lowering.graphs.measures import tensors
from exir_lowering.steps.legalizing.registry import HALF, Rule, require


class Fault(NamedTuple):
    """What is wrong in some kernels."""

    name: str
    operators: str  # without "aten."
    says: str  # a clause about the kernel
    applies: Callable[[Node], bool]
    cure: Rule | None = None  # None: a rule, or torch's decomposition
    wide: bool = False  # whether half precision is computed in float32 then


def _read(node: Node, number: int = 0) -> Tensor:
    return cast(Tensor, cast(Node, node.args[number]).meta["val"])


def _rows(node: Node, dim: Any = 0) -> list[int]:
    """Return the sizes of the first operand from a dimension on, with 1 for dynamic ones; nothing if it has no rows."""
    sizes = [size if type(size) is int else 1 for size in _read(node).shape]
    return [] if 0 in sizes[:dim] else sizes[dim:]


def _dtypes(node: Node) -> set[torch.dtype]:
    read = (operand.meta.get("val") for operand in node.all_input_nodes)
    return {value.dtype for value in tensors([*read, node.meta.get("val")])}


def _in_half(node: Node) -> bool:
    return not _dtypes(node).isdisjoint(HALF)


def _of_floats(node: Node) -> bool:
    return any(dtype.is_floating_point for dtype in _dtypes(node))


def _of_integers(node: Node) -> bool:
    return not _of_floats(node)


def _below_zero(node: Node) -> bool:
    bounds = [graphs.argument(node, name) for name in ("min", "max")]
    return _dtypes(node) == {torch.uint8} and any(isinstance(one, (int, float)) and one < 0 for one in bounds)


def _pools_nan(node: Node) -> bool:
    """Return whether what is pooled may be NaN: not if it is replaced where it is, or was a truth value."""
    pooled = cast(Node, node.args[0])
    name, read = graphs.operator_name(pooled), pooled.all_input_nodes
    if name == "aten.where.self" and graphs.operator_name(read[0]) == "aten.ne.Tensor":
        return {*read[0].args} != {pooled.args[2]}
    return _of_floats(node) and not (name.startswith("dim_order_ops.") and read[0].meta["val"].dtype is torch.bool)


def _becomes_complex(node: Node) -> bool:
    """Return whether a copy is complex, and what is copied is no float that has as many digits."""
    read, made = _read(node).dtype, node.meta["val"].dtype
    return made.is_complex and not read.is_complex and read is not made.to_real()


def _is_complex(node: Node) -> bool:
    """Return whether a tensor is computed of complex ones, or is one."""
    return any(True for _ in tensors(node.meta.get("val"))) and any(dtype.is_complex for dtype in _dtypes(node))


def _broadcasts_complex(node: Node) -> bool:
    """Return whether complex operands do not have the shape of the result; not whether sizes are equal by chance."""
    shape = tuple(node.meta["val"].shape)
    return _is_complex(node) and any(tuple(_read(node, number).shape) != shape for number in (0, 1))


def _broadcast(compute: Callable[..., Any], x: Tensor, y: Tensor, **kwargs: Any) -> Any:
    broadcast: Any = torch.broadcast_tensors
    return compute(*broadcast(x, y), **kwargs)


def _sums_number(node: Node) -> bool:
    """Return whether a tensor without dimensions is given one; the kernel sums to another type by other code."""
    same = node.meta["val"].dtype is _read(node).dtype
    return same and _read(node).dim() == 0 and node.args[1] not in (None, [], ())


def _normalized(
    x: Tensor, dims: Any, eps: float, weight: Any, bias: Any, inner: int = 0, shape: Any = None, stats: Any = None
) -> Any:
    """Return a normalised tensor, its mean, and one over the deviation; weights lack `inner` dimensions."""
    mean = x.mean(dims, keepdim=True)
    mean = mean + (x - mean).mean(dims, keepdim=True)  # what the kernel's mean, a plain sum, is off for large means
    apart = x - mean
    rstd = torch.rsqrt((apart * apart).mean(dims, keepdim=True) + eps)
    found = apart * rstd if shape is None else (apart * rstd).reshape(shape)
    weight, bias = (each[(..., *[None] * inner)] if inner and each is not None else each for each in (weight, bias))
    found = found if weight is None else found * weight
    mean, rstd = (one if stats is None else one.reshape(stats) for one in (mean, rstd))
    return found if bias is None else found + bias, mean, rstd


def _group_norm(x: Tensor, weight: Any, bias: Any, n: Any, c: Any, hxw: Any, group: int, eps: float) -> Any:
    return _normalized(x.reshape(n, group, -1), [-1], eps, weight, bias, x.dim() - 2, x.shape, (n, group))


def _max_pool(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    pool, nan = torch.ops.aten.max_pool2d_with_indices.default, x != x
    found, places = pool(torch.where(nan, float("-inf"), x), *args, **kwargs)
    inside, first = pool(nan.to(torch.float32), *args, **kwargs)
    return torch.where(inside > 0, float("nan"), found), torch.where(inside > 0, first, places)


def _along_last(x: Tensor, dims: Any, *rest: Any) -> Tensor:
    require(len(dims) == 1)
    run = torch.ops.aten._fft_c2r.default if x.is_complex() else torch.ops.aten._fft_r2c.default
    made: Tensor = run(x.movedim(dims[0], -1).contiguous(), [x.dim() - 1], *rest)
    return made.movedim(-1, dims[0])


_ACCUMULATING = (
    "var.correction var_mean.correction cumsum.default convolution.default addmm.default linear.default "
    "avg_pool2d.default scatter_add.default _native_batch_norm_legit_no_training.default "
    "_native_batch_norm_legit.default native_batch_norm.default"
)
_COPY, _POOL = "_to_dim_order_copy.default", "max_pool2d_with_indices"
_SQUARES = "its variance is a difference of squares, which loses its digits for large means"
_ENDS = "its kernel would end the process: its"

FAULTS = (
    Fault("half", _ACCUMULATING, "it accumulates in half precision, or overflows in it", _in_half, wide=True),
    Fault("half index", "index_put.default", "it accumulates in half precision",
          lambda node: _in_half(node) and bool(graphs.argument(node, "accumulate")), wide=True),
    Fault("half layer norm", "native_layer_norm.default", f"{_SQUARES}, or in half precision", _in_half),
    Fault("layer norm", "native_layer_norm.default", f"{_SQUARES}, or in half precision",  # of more, a mean is updated
          lambda node: math.prod(size if type(size) is int else 0 for size in cast(Any, node.args[1])) < 256,
          lambda x, shape, weight, bias, eps: _normalized(x, list(range(-len(shape), 0)), eps, weight, bias)),
    Fault("group norm", "native_group_norm.default", _SQUARES, _of_floats, _group_norm, wide=True),
    Fault("batch norm", "_native_batch_norm_legit.no_stats", _SQUARES, _of_floats,
          lambda x, weight, bias, training, momentum, eps: _normalized(
              x, [0, *range(2, x.dim())], eps, weight, bias, x.dim() - 2, stats=(-1,)), wide=True),
    Fault("remainder", "remainder.Tensor remainder.Scalar fmod.Tensor fmod.Scalar",
          "it computes remainders of integers in floats, and with the sign of the dividend", _of_integers),
    Fault("division", "div.Tensor_mode div.Scalar_mode", "it divides integers in floats, and zero by zero to infinity",
          lambda node: graphs.argument(node, "rounding_mode") == ("floor" if _of_floats(node) else "trunc")),
    Fault("power", "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar", "it computes powers of integers in floats",
          _of_integers),
    Fault("whole", "floor.default ceil.default trunc.default round.default", "it rounds integers in floats",
          _of_integers, torch.clone),
    Fault("shift", "bitwise_left_shift.Tensor bitwise_right_shift.Tensor",
          "it shifts by the remainder of what is negative or too large",
          lambda node: _of_integers(node) and graphs.operator_name(cast(Node, node.args[1])) != "aten.clamp.default"),
    Fault("mask", "masked_select.default", "its result has room for as many elements as its first operand has",
          lambda node: tuple(_read(node).shape) != tuple(_read(node, 1).shape)),
    Fault("copy", _COPY, "it refuses a copy that need not wait",
          lambda node: bool(graphs.argument(node, "non_blocking")),
          lambda x, *, dtype=None, **_: x.to(dtype or x.dtype, copy=True)),
    Fault("pool backward", f"{_POOL}_backward.default", "it leaves what no window chose as it was in memory",
          _of_floats),
    Fault("transform", "_fft_r2c.default _fft_c2r.default", "it transforms only what lies in memory as its result does",
          lambda node: (order := dim_order(node.meta["val"])) != tuple(range(len(order))), _along_last),
    Fault("copy to complex", _COPY, "it converts only some types of floats to complex numbers",
          _becomes_complex, lambda x, *, dtype, **_: x.to(dtype.to_real()).to(dtype)),
    Fault("complex to another type", _COPY, "it copies no complex number to another type",
          lambda node: (read := _read(node).dtype).is_complex and read is not node.meta["val"].dtype),
    *(Fault("complex shapes", f"{name}.Tensor", "it computes with complex numbers of equal shapes only",
            _broadcasts_complex, partial(_broadcast, getattr(torch, name))) for name in ("add", "sub", "mul", "div")),
    Fault("sign", "sign.default", "the sign of NaN is NaN for it", _of_floats),
    Fault("clamp", "clamp.default", "it refuses negative bounds for uint8", _below_zero,  # PyTorch's are bytes too
          lambda x, *bounds: torch.clamp(x, *(None if each is None else int(each) % 256 for each in bounds))),
    Fault("max pool", f"{_POOL}.default", "it takes NaN for less than any number", _pools_nan, _max_pool),
    Fault("empty", "amax.default amin.default", f"{_ENDS} tensor has no elements", lambda node: 0 in _rows(node)),
    Fault("empty rows", "_log_softmax.default", f"{_ENDS} rows have no elements",
          lambda node: 0 in _rows(node, node.args[1])),
    Fault("no dimension", "sum.dim_IntList", f"{_ENDS} tensor has no dimension, but it is given one", _sums_number),
    Fault("complex", "", "it does not compute complex numbers", _is_complex),
)  # fmt: skip

_COMPLEX = (
    "_fft_c2r _fft_r2c _to_dim_order_copy _clone_dim_order abs add as_strided_copy bmm cat diagonal_copy div embedding "
    "expand_copy index index_select mul permute_copy repeat select_copy slice_copy squeeze_copy sub sum unbind_copy "
    "unsqueeze_copy view_as_real_copy view_copy"
)
_OF_COMPLEX = frozenset(_COMPLEX.split())  # what computes or copies them; the last fault is that of all others

_BY_OPERATOR: dict[str, list[Fault]] = {}
for _fault in FAULTS:
    for _name in _fault.operators.split():
        _BY_OPERATOR.setdefault(_name, []).append(_fault)


def find_fault(node: Node) -> Fault | None:
    """Return what is wrong in the kernel of a call; None if nothing is known."""
    namespace, _, name = graphs.operator_name(node).partition(".")
    if namespace not in ("aten", "dim_order_ops"):
        return None
    general = () if name.partition(".")[0] in _OF_COMPLEX else FAULTS[-1:]
    return next((fault for fault in (*_BY_OPERATOR.get(name, ()), *general) if fault.applies(node)), None)
