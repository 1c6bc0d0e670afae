"""torchao's operators of quantisation in plain operators: the same bits, with dynamic sizes too.

A rule has the arguments of its operator. It is to be traced, one call at a time; it looks at no data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from exir_lowering.steps.legalizing.registry import rule


def dequantize_affine(
    input: torch.Tensor,
    block_size: Sequence[int],
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    input_dtype: torch.dtype,
    quant_min: float | None = None,
    quant_max: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the numbers that integers stand for; the elements of a block have one scale and zero point."""
    blocks, one_each, _ = _grid(input.shape, block_size)
    made = _from_integers(input.reshape(blocks), scale, zero_point, one_each, output_dtype)
    return made.reshape(input.shape)


def quantize_affine(
    input: torch.Tensor,
    block_size: Sequence[int],
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    output_dtype: torch.dtype,
    quant_min: float | None = None,
    quant_max: float | None = None,
) -> torch.Tensor:
    """Return the integers that stand for numbers."""
    lowest, highest = _bounds(output_dtype, quant_min, quant_max)
    blocks, one_each, _ = _grid(input.shape, block_size)
    common = torch.promote_types(input.dtype, scale.dtype)
    steps = input.reshape(blocks).to(common) * scale.reshape(one_each).reciprocal().to(common)
    rounded = torch.round(steps)
    if zero_point is not None and zero_point.numel():
        rounded = rounded + zero_point.reshape(one_each).to(common)
    kept = torch.uint8 if _bits(output_dtype) < 8 and str(output_dtype).startswith("torch.uint") else output_dtype
    return torch.clamp(rounded, lowest, highest).reshape(input.shape).to(kept)


def choose_qparams_affine(
    input: torch.Tensor,
    mapping_type: str,
    block_size: Sequence[int],
    target_dtype: torch.dtype,
    quant_min: float | None = None,
    quant_max: float | None = None,
    eps: float | None = None,
    scale_dtype: torch.dtype | None = None,
    zero_point_dtype: torch.dtype | None = None,
    keepdim: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and zero point of each block, from its least and largest element."""
    lowest, highest = _bounds(target_dtype, quant_min, quant_max)
    blocks, _, inside = _grid(input.shape, block_size)
    elements = input.reshape(blocks)
    least = torch.amin(elements, dim=inside, keepdim=True).clamp(max=0.0)
    largest = torch.amax(elements, dim=inside, keepdim=True).clamp(min=0.0)
    least_scale = torch.finfo(input.dtype).smallest_normal if eps is None else eps
    if mapping_type == "ASYMMETRIC":
        scale = _divide(largest - least, highest - lowest).clamp(min=least_scale)
        zero_point = (torch.round(least / scale).neg() + float(lowest)).clamp(lowest, highest)
        zero_point_dtype = zero_point_dtype or torch.int32
    else:
        if mapping_type == "SYMMETRIC":
            scale = _divide(torch.maximum(least.neg(), largest), (highest - lowest) / 2)
        else:  # SYMMETRIC_NO_CLIPPING_ERR; neither is NaN unless both are
            scale = torch.maximum(_divide(least, lowest), _divide(largest, highest))
        scale = scale.clamp(min=least_scale)
        zero_point = torch.full_like(scale, int((highest + lowest + 1) / 2))
    sizes = [
        size // width
        for size, width in zip(input.shape, block_size, strict=True)
        if keepdim or _is_one(width) or not _same(size, width)
    ]
    scale, zero_point = scale.reshape(sizes), zero_point.reshape(sizes)
    return scale.to(scale_dtype or input.dtype), zero_point.to(zero_point_dtype or zero_point.dtype)


def look_up(
    weight: torch.Tensor,
    indices: torch.Tensor,
    block_size: Sequence[int],
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    input_dtype: torch.dtype,
    quant_min: float | None = None,
    quant_max: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return rows of a table whose integers stand for numbers: an embedding, of which only these are computed."""
    rows, width = weight.shape[0], block_size[1]
    groups = weight.shape[1] // width

    def of_rows(table: Any) -> Any:
        if _is_one(block_size[0]):
            return torch.nn.functional.embedding(indices, table.reshape(rows, groups)).unsqueeze(-1)
        return table.reshape(groups, 1)

    taken = torch.nn.functional.embedding(indices, weight)
    scale, zero_point = of_rows(scale), of_rows(zero_point) if _given(zero_point) else None
    made = _from_integers(taken.reshape(*indices.shape, groups, width), scale, zero_point, scale.shape, output_dtype)
    return made.reshape(taken.shape)


@rule("_int_mm.default")
def int_mm(self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """Return the product of matrices of 8-bit integers, which 32 bits hold."""
    return torch.mm(self.to(torch.int32), mat2.to(torch.int32))


RULES: dict[str, Callable[..., Any]] = {
    "torchao.dequantize_affine.default": dequantize_affine,
    "torchao.quantize_affine.default": quantize_affine,
    "torchao.choose_qparams_affine.default": choose_qparams_affine,
}
"""A rule by the name of the operator whose arguments it has."""


def _divide(value: torch.Tensor, number: float) -> torch.Tensor:
    """Divide by a tensor: for a number, ExecuTorch's kernel multiplies by its reciprocal, which may round otherwise."""
    return value / torch.full_like(value, float(number))


def _from_integers(
    blocks: torch.Tensor, scale: torch.Tensor, zero_point: Any, one_each: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    value = blocks.to(dtype)
    if _given(zero_point):
        value = value - zero_point.reshape(one_each).to(dtype)
    common = torch.promote_types(dtype, scale.dtype)
    return (value.to(common) * scale.reshape(one_each).to(common)).to(dtype)


def _given(zero_point: torch.Tensor | None) -> bool:
    return zero_point is not None and zero_point.numel() > 0


def _grid(sizes: Sequence[int], block_size: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Return a shape that splits dimensions into blocks, that of what each block has one of, and where they differ."""
    blocks, one_each, inside = list[int](), list[int](), list[int]()
    for size, width in zip(sizes, block_size, strict=True):
        blocks.append(size if _is_one(width) else size // width)
        one_each.append(blocks[-1])
        if not _is_one(width):
            inside.append(len(blocks))
            blocks.append(width)
            one_each.append(1)
    return blocks, one_each, inside


def _is_one(width: int) -> bool:
    return isinstance(width, int) and width == 1  # a size that is not known yet is compared with nothing


def _same(size: int, width: int) -> bool:
    return isinstance(size, int) is isinstance(width, int) and bool(size == width)


def _bits(dtype: torch.dtype) -> int:
    return int(re.sub(r"\D", "", str(dtype)))


def _bounds(dtype: torch.dtype, lowest: float | None, highest: float | None) -> tuple[float, float]:
    """Return the least and the largest integer that is used."""
    bits, signed = _bits(dtype), not str(dtype).startswith("torch.uint")
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return least if lowest is None else lowest, most if highest is None else highest
