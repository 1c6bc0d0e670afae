"""ExecuTorch's pass that makes tensors of Python numbers beside tensors, put right while this thread converts.

A number takes no part in what torch promotes, a tensor does: beside an int32 without dimensions, 1 becomes an int64 and
makes the result one, and 0.1 beside a float64 loses half of its digits. Such numbers become tensors of the dtype that
the operator computes in.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from executorch.exir.pass_base import ProxyValue, map_args  # what a pass sees of values
from executorch.exir.passes import ScalarToTensorPass
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes  # what operators compute in
from torch.utils._python_dispatch import _disable_current_modes  # tensors that are constants, whatever mode torch is in

from exir_lowering._upstream import pins
from exir_lowering._upstream.locks import during, replacing

_mending: ContextVar[bool] = ContextVar("exir_lowering_mending_passes", default=False)


def mending_passes() -> AbstractContextManager[bool]:
    """Put the pass right for what this thread converts."""
    return during(_mending, True, _MENDING)


def _replacements() -> list[tuple[Any, str, Any]]:
    if not pins.is_on("scalar operands"):
        return []
    calling = ScalarToTensorPass.call_operator

    @wraps(calling)
    def call_operator(self: Any, op: Any, args: Any, kwargs: Any, meta: Any) -> Any:
        if _mending.get():
            args, kwargs = _with_exact(self, op, args, kwargs)
        return calling(self, op, args, kwargs, meta)

    return [(ScalarToTensorPass, "call_operator", call_operator)]


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
