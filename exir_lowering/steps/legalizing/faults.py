"""What is wrong in kernels of ExecuTorch's runtime that do run: each fault with what computes the same without it.

`tests/steps/legalizing/test_faults.py` has a reproduction of each, which fails when a release has mended it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.graphs.operators.calls import tensors
from exir_lowering.steps.legalizing.rules import RULES
from exir_lowering.steps.legalizing.widening import in_dtype

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong in some kernels."""

    name: str
    operators: frozenset[str]
    says: str  # a clause about the kernel
    applies: Callable[[Node], bool]
    cure: Callable[[Any, Node], Callable[..., Any] | None]  # of the operator, and of a call of it


def _reads(node: Node, dtypes: tuple[torch.dtype, ...]) -> bool:
    values = [operand.meta.get("val") for operand in node.all_input_nodes]
    return any(value.dtype in dtypes for value in tensors(values))


def _in_half(node: Node) -> bool:
    return _reads(node, _HALF)


def _of_integers(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def _by_rule(operator: Any, node: Node) -> Callable[..., Any] | None:
    return RULES.get(graphs.operator_name(node))


def _in_float32(operator: Any, node: Node) -> Callable[..., Any] | None:
    return in_dtype(operator, _HALF, torch.float32, node)


def _of_floats(node: Node) -> bool:
    return not _of_integers(node)


def _truncates(node: Node) -> bool:
    return _of_integers(node) and node.kwargs.get("rounding_mode", "trunc") == "trunc"


def _floors(node: Node) -> bool:
    return _of_floats(node) and node.kwargs.get("rounding_mode", "floor") == "floor"


def _crops(node: Node) -> bool:
    return any(isinstance(each, int) and each < 0 for each in cast(Sequence[Any], node.args[1]))


def _wraps(node: Node) -> bool:
    return _reads(node, (torch.uint8,)) and any(isinstance(each, int) and each < 0 for each in node.args[1:])


def _broadcasts(node: Node) -> bool:
    first, second = (operand.meta["val"].shape for operand in cast(Sequence[Node], node.args))
    return tuple(first) != tuple(second)


_ACCUMULATING = (
    "native_layer_norm.default native_group_norm.default native_batch_norm.default var.correction var.dim var.default "
    "_native_batch_norm_legit_no_training.default _native_batch_norm_legit.default _native_batch_norm_legit.no_stats "
    "cumsum.default prod.default prod.dim_int convolution.default"
)

FAULTS: tuple[Fault, ...] = (
    Fault(
        "half",
        frozenset(f"aten.{name}" for name in _ACCUMULATING.split()),
        "it accumulates in half precision, or overflows in it",
        _in_half,
        _in_float32,
    ),
    Fault(
        "remainder",
        frozenset({"aten.remainder.Tensor", "aten.remainder.Scalar"}),
        "its remainders of integers have the sign of the dividend",
        _of_integers,
        _by_rule,
    ),
    Fault(
        "integer quotient",
        frozenset({"aten.div.Tensor_mode", "aten.div.Scalar_mode", "aten.fmod.Tensor", "aten.fmod.Scalar"}),
        "it divides integers as floats, which is wrong beyond 2**53",
        _truncates,
        _by_rule,
    ),
    Fault(
        "integer power",
        frozenset({"aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar"}),
        "it computes powers of integers as floats, which is wrong beyond 2**53 and for negative exponents",
        _of_integers,
        _by_rule,
    ),
    Fault(
        "integer rounding",
        frozenset({"aten.floor.default", "aten.ceil.default", "aten.trunc.default"}),
        "it rounds integers as floats, which changes large ones",
        _of_integers,
        _by_rule,
    ),
    Fault(
        "shift",
        frozenset({"aten.bitwise_left_shift.Tensor", "aten.bitwise_right_shift.Tensor"}),
        "it shifts by the remainder of what is negative or too large",
        _of_integers,
        _by_rule,
    ),
    Fault(
        "floor division by zero",
        frozenset({"aten.div.Tensor_mode", "aten.floor_divide.default"}),
        "its quotients of floats by zero are infinite where they are NaN",
        _floors,
        _by_rule,
    ),
    Fault("sign", frozenset({"aten.sign.default"}), "its sign of NaN is NaN, not zero", _of_floats, _by_rule),
    Fault("crop", frozenset({"aten.constant_pad_nd.default"}), "it does not take negative padding", _crops, _by_rule),
    Fault("bounds", frozenset({"aten.clamp.default"}), "it does not take negative bounds of bytes", _wraps, _by_rule),
    Fault(
        "broadcast mask",
        frozenset({"aten.masked_select.default"}),
        "its result has room for as many elements as its first operand has",
        _broadcasts,
        _by_rule,
    ),
)

_BY_OPERATOR: Mapping[str, tuple[Fault, ...]] = {
    name: tuple(fault for fault in FAULTS if name in fault.operators)
    for name in {name for fault in FAULTS for name in fault.operators}
}


def find_fault(node: Node) -> Fault | None:
    """Return what is wrong in the kernel of a call; None if nothing is known."""
    found = _BY_OPERATOR.get(graphs.operator_name(node), ())
    return next((fault for fault in found if fault.applies(node)), None)
