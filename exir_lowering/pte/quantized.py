"""What the kernels of quantised programs take: on anything else they end the process, or read memory of others.

Kernels of ATen report most calls that they cannot execute. These abort, and they take other types than the operators of
PyTorch. So each of them has its rule here, a function of what it is called with, and at last what it writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from exir_lowering.pte.value_kinds import DTYPES

NAMESPACE = "quantized_decomposed::"
UNKNOWN = math.nan
"""A number that is known only at run time: no comparison with it holds."""

Size = int | None


class Layout(NamedTuple):
    """A tensor of a call."""

    dtype: torch.dtype
    sizes: tuple[Size, ...]  # None where it is known only at run time
    most: int | None  # elements; None if there is no bound


_Optional = Layout | None
_Wrong = Iterator[str]

_REALS = (torch.float32, torch.float16, torch.float64)
_HALVES = (torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32)


def why_wrong(name: str, values: Sequence[Any]) -> str | None:
    """Return why a kernel cannot be called with a `Layout` per tensor, numbers, `UNKNOWN` and None; None if it can."""
    rule = _RULES.get(name.removeprefix(NAMESPACE))
    return next(rule(*values), None) if rule is not None else None


def _names(types: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in types)


def _is(what: str, tensor: Layout, *types: torch.dtype) -> _Wrong:
    if tensor.dtype not in types:
        yield f"{what}: got a tensor of {_names([tensor.dtype])}, expected {_names(types)}"


def _count(sizes: Sequence[Size]) -> Size:
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) or 0 in known else None


def _differ(one: Size, other: Size) -> bool:
    return one is not None and other is not None and one != other


def _has(what: str, tensor: Layout, elements: Size) -> _Wrong:
    if _differ(_count(tensor.sizes), elements):
        yield f"{what}: got {_count(tensor.sizes)} elements, expected {elements}"


def _shaped(out: Layout, sizes: Sequence[Size], most: int | None = None) -> _Wrong:
    """Check that a result has a shape, and room for it where that is known only at run time."""
    if len(out.sizes) != len(sizes) or any(map(_differ, out.sizes, sizes)):
        yield f"got the shape {list(out.sizes)}, expected {list(sizes)}"
    if most is not None and out.most is not None and most > out.most:
        yield f"the result has room for {out.most} elements, not for {most}"


def _writes(out: Layout, code: Any, *, optional: bool = False) -> _Wrong:
    """Check that a result has the type that an argument names."""
    if code is None and optional:
        return
    dtype = DTYPES.get(code)
    if dtype != out.dtype:
        yield f"the result: got a tensor of {_names([out.dtype])}, but the call names {dtype or code}"


def _per_channel(tensor: Layout, axis: Any, check: Callable[[Size], _Wrong]) -> _Wrong:
    """Check with the number of channels that a tensor has along an axis."""
    rank = len(tensor.sizes)
    if isinstance(axis, int) and -rank <= axis < rank:
        yield from check(tensor.sizes[axis])
    else:
        yield f"there is no axis {axis} in a tensor of {rank} dimensions"


def _scales(scale: Layout, point: _Optional, elements: Size, *, narrow: bool = False) -> _Wrong:
    """Check scales and zero points, which may have half as many bits if `narrow`."""
    yield from _is("the scale", scale, torch.float64, *([torch.float32] if narrow else []))
    yield from _has("the scale", scale, elements)
    if point is not None:
        yield from _is("the zero point", point, torch.int64, *([torch.int32] if narrow else []))
        yield from _has("the zero point", point, elements)


def _quantizes(x: Layout, low: Any, high: Any, code: Any, out: Layout) -> _Wrong:
    yield from _is("the input", x, *_REALS)
    yield from _writes(out, code)
    yield from _is("the result", out, *_INTEGERS)
    bounds = torch.iinfo(out.dtype)
    if low < bounds.min or high > bounds.max:
        yield f"{low} to {high} is not within {bounds.min} to {bounds.max}"
    yield from _shaped(out, x.sizes, x.most)


def _dequantizes(q: Layout, low: Any, high: Any, code: Any, out_code: Any, out: Layout) -> _Wrong:
    yield from _is("the input", q, *_INTEGERS)
    if DTYPES.get(code) != q.dtype:
        yield f"the input: got a tensor of {_names([q.dtype])}, but the call names {DTYPES.get(code) or code}"
    if low > high:
        yield f"{low} to {high} are no bounds"
    yield from _writes(out, out_code, optional=True)
    yield from _is("the result", out, *_REALS)
    yield from _shaped(out, q.sizes, q.most)


def _dequantize_channels(q: Layout, scale: Layout, point: _Optional, axis: Any, *others: Any) -> _Wrong:
    yield from _per_channel(q, axis, lambda count: _scales(scale, point, count, narrow=True))
    yield from _dequantizes(q, *others)
    if q.dtype == torch.int8 and others[-2] is None:
        yield from _is("the result", others[-1], torch.float32)


def _tokens(tensor: Layout) -> Iterator[str]:
    if not tensor.sizes:
        yield "the input has no dimension"


def _chosen(x: Layout, scale: Layout, point: Layout) -> _Wrong:
    yield from _is("the input", x, torch.float32)
    yield from _is("the scale", scale, torch.float64)
    yield from _is("the zero point", point, torch.int64)


def _choose(x: Layout, low: Any, high: Any, _: Any, dtype: Any, scale: Layout, point: Layout) -> _Wrong:
    yield from _chosen(x, scale, point)
    yield from _scales(scale, point, 1)
    if low >= high:
        yield f"{low} to {high} are no bounds"
    if 0 in x.sizes:
        yield "the input has no elements"


def _choose_tokens(x: Layout, _: Any, scale: Layout, point: Layout) -> _Wrong:
    yield from _tokens(x)
    yield from _chosen(x, scale, point)
    for out in (scale, point):
        yield from _shaped(out, (*x.sizes[:-1], 1))
    if x.sizes[-1] == 0 and 0 not in x.sizes[:-1]:
        yield "the tokens have no elements"


def _add(*values: Any) -> _Wrong:
    (a, *of_a), (b, *of_b), (*of_result, out) = values[:5], values[5:10], values[10:]
    yield from _is("the first input", a, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    yield from _is("the second input", b, a.dtype)
    yield from _is("the result", out, a.dtype)
    yield from _shaped(b, a.sizes, a.most)
    yield from _shaped(out, a.sizes, a.most)
    for *_, low, high in (of_a, of_b, of_result):
        if low < 0 or high > 255 or low > high:
            yield f"{low} to {high} is not within 0 to 255"


def _rows(
    packed: int, weight: Layout, scale: Layout, point: _Optional, low: Any, high: Any, index: Layout, out: Layout
) -> _Wrong:
    """Check a look-up of rows of which each byte has so many elements."""
    yield from _is("the weight", weight, torch.uint8, *([torch.int8] if packed == 1 else []))
    yield from _is("the indices", index, torch.int64, *([] if packed == 1 else [torch.int32]))
    yield from _is("the result", out, *_HALVES)
    yield from _is("the scale", scale, *_HALVES)
    if len(weight.sizes) != 2 or len(scale.sizes) not in (1, 2) or _differ(weight.sizes[0], scale.sizes[0]):
        yield f"the weight has the shape {list(weight.sizes)}, and the scale {list(scale.sizes)}"
    width = None if weight.sizes[1] is None else weight.sizes[1] * packed
    groups = scale.sizes[1] if len(scale.sizes) == 2 else 1
    if groups == 0 or (groups is not None and width is not None and width % groups):
        yield f"rows of {width} elements have {groups} scales"
    if point is not None:
        yield from _is("the zero point", point, scale.dtype)
        yield from _is("the zero point", point, out.dtype)
        yield from _shaped(point, scale.sizes)
    if low > high:
        yield f"{low} to {high} are no bounds"
    yield from _shaped(out, (*index.sizes, width))


def _look_up(packed: int, *values: Any) -> _Wrong:
    yield from _rows(packed, *values)
    yield from _is("the scale", values[1], values[-1].dtype)  # it is read as the result's type


def _look_up_as(packed: int, *values: Any) -> _Wrong:
    *given, code, out = values
    yield from _rows(packed, *[*given, out])
    yield from _writes(out, code, optional=True)


def _mixed_linear(x: Layout, weight: Layout, scale: Layout, *_: Any) -> _Wrong:
    if 0 in x.sizes[1:2] or 0 in scale.sizes[1:2]:
        yield "its groups have no elements"


_PACKED = {"byte": 1, "4bit": 2, "2bit": 4}
"""How many elements of a weight each byte has."""

_RULES: Mapping[str, Callable[..., _Wrong]] = {
    "quantize_per_tensor.out": lambda x, scale, point, *rest: _quantizes(x, *rest),
    "quantize_per_tensor.Tensor_out": lambda x, scale, point, *rest: chain(
        _scales(scale, point, 1), _quantizes(x, *rest)
    ),
    "dequantize_per_tensor.out": lambda q, scale, point, *rest: _dequantizes(q, *rest),
    "dequantize_per_tensor.Tensor_out": lambda q, scale, point, *rest: chain(
        _scales(scale, point, 1), _dequantizes(q, *rest)
    ),
    "quantize_per_channel.out": lambda x, scale, point, axis, *rest: chain(
        _per_channel(x, axis, lambda count: _scales(scale, point, count)), _quantizes(x, *rest)
    ),
    "dequantize_per_channel.out": _dequantize_channels,
    "quantize_per_token.out": lambda x, scale, point, *rest: chain(
        _tokens(x), _scales(scale, point, _count(x.sizes[:-1])), _quantizes(x, *rest)
    ),
    "dequantize_per_token.out": lambda q, scale, point, *rest: chain(
        _tokens(q), _scales(scale, point, _count(q.sizes[:-1]), narrow=True), _dequantizes(q, *rest)
    ),
    "choose_qparams.Tensor_out": _choose,
    "choose_qparams_per_token_asymmetric.out": _choose_tokens,
    "add.out": _add,
    "mixed_linear.out": _mixed_linear,
    **{f"embedding_{name}.out": partial(_look_up, packed) for name, packed in _PACKED.items()},
    **{f"embedding_{name}.dtype_out": partial(_look_up_as, packed) for name, packed in _PACKED.items()},
}
"""The rules; `mixed_mm` reports what it does not take."""
