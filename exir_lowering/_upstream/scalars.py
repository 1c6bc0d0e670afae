"""Python numbers beside tensors, which ExecuTorch's conversion turns into tensors of their own dtype.

A number takes no part in what torch promotes, a tensor does: beside an int32 without dimensions, 1 becomes an int64 and
makes the result one, and 0.1 beside a float64 loses half of its digits. Such numbers become tensors of the dtype that
the operator computes in, as long as the code of ExecuTorch's pass is what it was when this was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch

# The pass that calls `torch.tensor` for each number, and what it sees.
from executorch.exir.pass_base import ProxyValue, map_args
from executorch.exir.passes import ScalarToTensorPass

# The dtype that an operator computes in.
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

# Tensors that are constants, whatever mode torch is in.
from torch.utils._python_dispatch import _disable_current_modes

from exir_lowering._upstream.contents import source_digest
from exir_lowering._upstream.replacing import replacing

__all__ = [
    "SCALAR_PASS",
    "are_exact",
    "exact_scalars",
]

SCALAR_PASS = "acecfcdbda6f6dbb"
"""The first digits of the SHA-256 of the source of ExecuTorch's function when it was looked at."""

_exact: ContextVar[bool] = ContextVar("exir_lowering_exact_scalars", default=False)


@contextmanager
def exact_scalars() -> Iterator[None]:
    """Let what this thread converts have the dtypes and the digits that torch computes with."""
    token = _exact.set(True)
    try:
        with _EXACT:
            yield
    finally:
        _exact.reset(token)


def are_exact() -> bool:
    """Return whether ExecuTorch's pass is the known one."""
    return source_digest(ScalarToTensorPass.call_operator) == SCALAR_PASS


def _replacements() -> list[tuple[Any, str, Any]]:
    calling = ScalarToTensorPass.call_operator

    @wraps(calling)
    def call_operator(self: Any, op: Any, args: Any, kwargs: Any, meta: Any) -> Any:
        if _exact.get():
            args, kwargs = _with_exact(self, op, args, kwargs)
        return calling(self, op, args, kwargs, meta)

    return [(ScalarToTensorPass, "call_operator", call_operator)] if are_exact() else []


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
            return torch.tensor(value, dtype=dtype) if digits or dtype is not _promoted(*tensors, usual) else value

    changed: tuple[Any, Any] = map_args(op, exact, args, kwargs)
    return changed


def _promoted(*operands: Any) -> torch.dtype:
    _, dtype = elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    return dtype


def _is_tensor(arg: Any) -> bool:
    return isinstance(arg.type, torch.TensorType)


def _is_number(value: Any) -> bool:
    return isinstance(value, (float, int, bool))


_EXACT = replacing(_replacements)
