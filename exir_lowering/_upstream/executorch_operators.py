"""ExecuTorch's operators that its runtime has kernels for, but that only its compiler registers with torch.

A file is checked against them before it runs, also in a process without the compiler. They cannot be registered here:
the compiler, if it is imported later, would register them again, which is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

_EMBEDDING = (
    "Tensor weight, Tensor weight_scales, Tensor? weight_zero_points, "
    "int weight_quant_min, int weight_quant_max, Tensor indices, *, "
)
_SCHEMAS = (
    "dim_order_ops::_to_dim_order_copy.out("
    "Tensor self, *, bool non_blocking=False, int[]? dim_order=None, Tensor(a!) out) -> Tensor(a!)",
    "dim_order_ops::_empty_dim_order.out(int[] size, *, int[]? dim_order=None, Tensor(a!) out) -> Tensor(a!)",
    "dim_order_ops::_clone_dim_order.out("
    "Tensor self, *, bool non_blocking=False, int[]? dim_order=None, Tensor(a!) out) -> Tensor(a!)",
    "et_copy::_h2d_copy.out(Tensor self, *, Tensor(a!) out) -> Tensor(a!)",
    "et_copy::_d2h_copy.out(Tensor self, *, Tensor(a!) out) -> Tensor(a!)",
    *(
        f"quantized_decomposed::embedding_{bits}.{overload}({_EMBEDDING}{dtype}Tensor(a!) out) -> Tensor(a!)"
        for bits in ("byte", "4bit", "2bit")
        for overload, dtype in (("out", ""), ("dtype_out", "ScalarType? dtype=None, "))
    ),
)


@lru_cache(maxsize=1)
def _parsed() -> Mapping[tuple[str, str], Any]:
    parsed = map(torch._C.parse_schema, _SCHEMAS)
    return {(one.name, one.overload_name): one for one in parsed}


def schema(name: str, overload: str) -> Any:
    """Return the schema of an operator ("dim_order_ops::_clone_dim_order", "out"); None if it is not one of these."""
    return _parsed().get((name, overload))


def function(name: str, overload: str) -> tuple[Callable[..., Any], bool] | None:
    """Return what computes an operator's result from all arguments but the written one, and if it takes a dtype."""
    return _FUNCTIONS.get(name) if overload == "out" else None


def _format(order: Sequence[int] | None) -> torch.memory_format:
    if order is None:
        return torch.preserve_format
    if list(order) == sorted(range(len(order))):
        return torch.contiguous_format
    if list(order) == [0, 2, 3, 1]:
        return torch.channels_last
    raise ValueError(f"Failed to map a given dim_order: {list(order)} to a torch.memory_format")


def _to(
    self: torch.Tensor, *, dtype: torch.dtype, non_blocking: bool = False, dim_order: Sequence[int] | None = None
) -> torch.Tensor:
    made: torch.Tensor = torch.ops.aten._to_copy(
        self, dtype=dtype, non_blocking=non_blocking, memory_format=_format(dim_order)
    )
    return made


def _empty(size: Sequence[int], *, dtype: torch.dtype, dim_order: Sequence[int] | None = None) -> torch.Tensor:
    made: torch.Tensor = torch.ops.aten.empty.memory_format(
        size, dtype=dtype, device="meta", memory_format=_format(dim_order)
    )
    return made


def _clone(self: torch.Tensor, *, non_blocking: bool = False, dim_order: Sequence[int] | None = None) -> torch.Tensor:
    if non_blocking:
        raise ValueError("a copy within one device cannot be non-blocking")
    return self.clone(memory_format=_format(dim_order))


def _copy(self: torch.Tensor) -> torch.Tensor:
    return self.clone()


_FUNCTIONS: Mapping[str, tuple[Callable[..., Any], bool]] = {
    "dim_order_ops::_to_dim_order_copy": (_to, True),
    "dim_order_ops::_empty_dim_order": (_empty, True),
    "dim_order_ops::_clone_dim_order": (_clone, False),
    "et_copy::_h2d_copy": (_copy, False),
    "et_copy::_d2h_copy": (_copy, False),
}
