"""The kernels of quantised programs, as PyTorch's operators compute: ExecuTorch's own may end the process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from exir_lowering._upstream.operators import defining, find_operator

NAMESPACE = "quantized_decomposed"

Function = Callable[..., Any]
"""Takes the values of a call without what is written, and then the type of the first of those; returns the results."""


def find_function(kernel: str) -> Function | None:
    """Return what computes a kernel, such as "add.out"; None if it is unknown."""
    if kernel in _OWN:
        return _OWN[kernel]
    name, overload = _OF_PYTORCH.get(kernel, ("", ""))
    for _ in defining(NAMESPACE) if name else ():
        found = find_operator(NAMESPACE, name, overload)
        if found is not None:
            return _calling(found.call, any(each.name == "out_dtype" for each in found.arguments))
    return None


def _calling(operator: Any, names_dtype: bool) -> Function:
    def call(x: torch.Tensor, *others: Any) -> Any:
        *given, dtype = others
        # The runtime's kernels take more types than these operators.
        if x.dtype == torch.float64:
            x = x.float()
        elif x.dtype == torch.uint16:  # to be dequantised: the type is followed by the result's
            x, given[-2] = x.int(), torch.int32
        return operator(x, *given[:-1], out_dtype=given[-1] or dtype) if names_dtype else operator(x, *given)

    return call


_OF_PYTORCH: Mapping[str, tuple[str, str]] = {
    **{
        f"{step}_per_{what}.out": (f"{step}_per_{what}", "default")
        for step in ("quantize", "dequantize")
        for what in ("tensor", "channel", "token")
    },
    "quantize_per_tensor.Tensor_out": ("quantize_per_tensor", "tensor"),
    "dequantize_per_tensor.Tensor_out": ("dequantize_per_tensor", "tensor"),
    "choose_qparams.Tensor_out": ("choose_qparams", "tensor"),
    "choose_qparams_per_token_asymmetric.out": ("choose_qparams_per_token_asymmetric", "default"),
}


def _look_up(bits: int) -> Function:
    def look_up(weight: Any, scale: Any, point: Any, low: int, high: int, indices: Any, *others: Any) -> Any:
        rows = indices.flatten()
        found = weight.index_select(0, rows)
        if bits < 8:
            first_is_low = bits == 2
            shifts = range(0, 8, bits) if first_is_low else range(8 - bits, -1, -bits)
            parts = [(found >> shift) & ((1 << bits) - 1) for shift in shifts]
            found = torch.stack(parts, -1).flatten(1).to(torch.int8) - (1 << (bits - 1))
        groups = scale.index_select(0, rows).float().reshape(len(rows), -1, 1)
        values = found.float().reshape(len(rows), groups.shape[1], -1)
        if point is not None:
            values = values - point.index_select(0, rows).float().reshape(groups.shape)
        return (values * groups).reshape(*indices.shape, found.shape[1])

    return look_up


def _add(*values: Any) -> Any:
    reals = [(x.float() - point) * scale for x, scale, point, *_ in (values[:5], values[5:10])]
    scale, point, low, high, dtype = values[10:]
    return (torch.round((reals[0] + reals[1]) / scale) + point).clamp(low, high).to(dtype)


def _without_points(point: Any) -> None:
    if point is not None:
        raise ValueError("zero points are not supported by ExecuTorch's kernel")


def _mixed_mm(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, point: Any, dtype: torch.dtype) -> Any:
    _without_points(point)
    return x.float() @ (weight.float() * scale.float()[:, None])


def _mixed_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, point: Any, *_: Any) -> Any:
    _without_points(point)
    scales = scale.float().reshape(len(weight), -1)
    wide = scales.repeat_interleave(-(-weight.shape[1] // scales.shape[1]), 1)[:, : weight.shape[1]]
    return x.float() @ (weight.float() * wide).T


_OWN: Mapping[str, Function] = {
    "add.out": _add,
    "mixed_mm.out": _mixed_mm,
    "mixed_linear.out": _mixed_linear,
    **{
        f"embedding_{name}.{overload}": _look_up(bits)
        for name, bits in (("byte", 8), ("4bit", 4), ("2bit", 2))
        for overload in ("out", "dtype_out")
    },
}
"""What PyTorch has no operator for."""
