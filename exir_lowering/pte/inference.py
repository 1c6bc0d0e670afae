"""The types and shapes that kernels make from those of their arguments, as PyTorch's operators say.

Some kernels of the runtime check what they are called with; the others read and write as far as one of the shapes says.
So a file's calls are checked against the operator: on tensors that have a type and a shape, but no memory, or have one
element, if the operator computes each element alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from exir_lowering._upstream import installed
from exir_lowering._upstream.meta_functions import WITHOUT_COMPILER
from exir_lowering._upstream.operators import FunctionalOperator, functional_operator
from exir_lowering.errors import let_through
from exir_lowering.graphs.operators.calls import tensors
from exir_lowering.pte import quantized
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.instructions import KERNEL, Body
from exir_lowering.pte.slots import KernelTypes as K
from exir_lowering.pte.value_kinds import MemoryLayout, Tensor, strides

_ALONE = frozenset(
    {
        *(torch.uint16, torch.uint32, torch.uint64),
        *(torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz),
    }
)
"""The types on which the runtime ends the process when it looks for the common type of two tensors."""
_CONVERTING = frozenset({"aten::_to_copy", "aten::copy", "dim_order_ops::_to_dim_order_copy"})
_CONVOLUTION = "aten::convolution"
"""A kernel whose operator checks types only when it computes."""
_CONVERTED = frozenset(
    {
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)
"""The types of a bias that a convolution of another type converts; it ends the process on the others."""
_NORMS = frozenset(
    {
        *("aten::native_layer_norm", "aten::native_group_norm"),
        *("aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_no_training"),
    }
)
"""Kernels whose mean and deviation have the type of what they are of, where torch has float32 for half floats."""

_FATAL = frozenset(
    {"aten::_log_softmax", "aten::amax", "aten::amin", "aten::narrow_copy", "aten::sum", "aten::unfold_copy"}
)
"""Kernels that end the process on some calls that torch's operators execute; `why_fatal` says which."""


def check_kernels(body: Body) -> None:
    """Refuse kernels that do not write what they make of their arguments, as far as these are known before a run."""
    if not any(signature is not None and signature.written for signature in body.signatures):
        return
    # No other operator is called here because a file names it. Libraries may add kernels at any time.
    kernels = installed.kernels() or frozenset()
    for code, target, arguments in body.instructions():
        name, overload = body.operators[target] if code == KERNEL else ("", "")
        if code == KERNEL and name.startswith(quantized.NAMESPACE):
            _check_quantized(body, target, arguments)
        elif code == KERNEL and (f"{name}.{overload}" if overload else name) in kernels:
            found = functional_operator(name, overload)
            if found is not None:
                _check(body, body.name(target), found, arguments)


def _check_quantized(body: Body, target: int, arguments: Sequence[int]) -> None:
    name, found = body.name(target), body.signatures[target]
    if found is None:
        return
    values = [_outline(body, index) for index in arguments[: len(found.types)]]
    if None in [value for value, type_ in zip(values, found.types, strict=True) if type_ == "Tensor"]:
        return  # it is not known what it is
    why = quantized.why_wrong(name, values)
    if why is not None:
        raise CorruptError(f"{name} would end the process, or misread memory: {why}")


def _outline(body: Body, index: int) -> Any:
    """Return what is known about a value, as `quantized.why_wrong` takes it."""
    content, varies = body.values[index].content, index in body.results
    if not isinstance(content, Tensor):
        return quantized.UNKNOWN if varies else content
    sizes = content.sizes if not (content.dynamic or varies) else (None,) * len(content.sizes)
    return quantized.Layout(content.dtype, sizes, None if content.unbound else math.prod(content.sizes))


def _check(body: Body, name: str, operator: FunctionalOperator, arguments: Sequence[int]) -> None:
    outputs = [item for position in operator.outputs for item in body.items(arguments[position])]
    plans = [plan for index in outputs if isinstance(plan := body.values[index].content, Tensor)]
    if len(plans) != len(outputs):
        return
    given = [arguments[position] for position, _ in operator.inputs]
    used = [item for index in given for item in (index, *body.items(index))]
    certain = not any(_varies(body, index) for index in (*used, *outputs))
    described = tuple(_describe(body, index) for index in given)
    own = name.partition(".")[0]
    _check_given(name, own, described, certain, plans)
    made = _infer(operator, described, plans[0].dtype if operator.dtype else None)
    if made is None or (isinstance(made, str) and not certain):
        return
    shown = ", ".join(str(content) if isinstance(content, MemoryLayout) else repr(content) for _, content in described)
    if isinstance(made, str):
        if all(0 in plan.sizes for plan in plans):
            return  # nothing is written; operators refuse some tensors without elements that kernels take
        raise CorruptError(f"{name} cannot be called with {shown}: {made}")
    if len(made) != len(plans):
        raise CorruptError(f"{name} makes {len(made)} tensors, but has to write {len(plans)}")
    for (dtype, shape), plan in zip(made, plans, strict=True):
        dtype = made[0][0] if own in _NORMS else dtype
        # Operators disagree about empty tensors, batch_norm even from device to device.
        same = shape == plan.sizes if certain else len(shape) == len(plan.sizes)
        if dtype != plan.dtype or not (same or 0 in shape or 0 in plan.sizes):
            raise CorruptError(
                f"{name}, called with {shown}, makes a tensor of {dtype} of shape {list(shape)}, but has to write "
                f"{plan}"
            )


def _check_given(
    name: str, own: str, described: tuple[_Described, ...], certain: bool, results: Sequence[Tensor]
) -> None:
    """Refuse a call on which a kernel ends the process; those that check a call themselves report an error."""
    layouts = [content for _, content in described if isinstance(content, MemoryLayout)]
    types = [layout.dtype for layout in layouts]
    refused = not _ALONE.isdisjoint(types) and own not in _CONVERTING
    if own == _CONVOLUTION:  # it converts its bias only
        refused |= types[:1] != types[1:2] or not _CONVERTED.issuperset(types[2:])
    if len(set(types)) > 1 and refused:
        raise CorruptError(f"{name} is called with tensors of {' and '.join(sorted(map(str, set(types))))}")
    converts = bool(layouts and results) and layouts[0].dtype != results[0].dtype
    fatal = why_fatal(own, described, layouts[0].sizes if certain and layouts else None, converts)
    if fatal is not None:
        raise CorruptError(f"{name} would end the process: {fatal}")


def why_fatal(
    own: str, described: Sequence[tuple[int, Any]], sizes: tuple[int, ...] | None, converts: bool
) -> str | None:
    """Return why a kernel ends the process where torch's operator returns a result, as a clause; None if it does not.

    These kernels, of ExecuTorch 1.5, divide by zero or abort. `sizes` are those of the first tensor, None if uncertain;
    `converts` says whether the result has another type than that tensor.
    """
    if own not in _FATAL:
        return None
    dim = described[1][1]
    if own == "aten::narrow_copy" and isinstance(dim, int):
        return f"its dimension is {dim}, counted from the back" if dim < 0 else None
    if sizes is None:
        return None
    if own in ("aten::amax", "aten::amin"):
        return "its tensor has no elements" if 0 in sizes else None
    if own in ("aten::sum", "aten::unfold_copy"):
        summed_otherwise = own == "aten::sum" and converts  # by other code of the kernel
        given = sizes == () and dim not in (None, ()) and not summed_otherwise
        return "its tensor has no dimension, but it is given one" if given else None
    if own == "aten::_log_softmax" and isinstance(dim, int) and 0 not in sizes[:dim]:
        return "its rows have no elements" if 0 in sizes[dim:] else None
    return None


_Described = tuple[int, Any]
"""A value: its kind, and its content, a `MemoryLayout` for a tensor and a tuple of these pairs for a list of values."""


@lru_cache(maxsize=8192)  # models repeat their layers, so that most calls repeat earlier ones
def _infer(
    operator: FunctionalOperator, given: tuple[_Described, ...], dtype: torch.dtype | None
) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...] | str | None:
    """Return the types and shapes that an operator makes, why it makes none, or None when it does not say."""
    quick = _pointwise(operator, given)
    if quick is not None:
        return (quick,)
    named = {argument: _value(one) for (_, argument), one in zip(operator.inputs, given, strict=True)}
    if operator.dtype:
        named["dtype"] = dtype
    try:
        with torch.no_grad(), WITHOUT_COMPILER:
            made = operator.call(**named)
    except NotImplementedError:
        return None
    except Exception as error:
        let_through(error)
        return str(error).partition("\n")[0]
    return tuple((result.dtype, tuple(result.shape)) for result in tensors(made))


def _pointwise(
    operator: FunctionalOperator, given: tuple[_Described, ...]
) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Return what an elementwise operator makes, found with one element, None for others.

    On tensors without memory it would import sympy, which takes a fifth of the time of importing torch.
    """
    layouts = [content for _, content in given if isinstance(content, MemoryLayout)]
    if not layouts or torch.Tag.pointwise not in getattr(operator.call, "tags", ()):
        return None
    if getattr(operator.call, "namespace", "") != "aten":  # kernels of others are not executed to read a file
        return None
    if not all(one.dtype.is_floating_point for one in layouts):  # for others CPU and meta tensors differ, rarely
        return None
    named = {
        argument: torch.ones([1] * len(content.sizes), dtype=content.dtype, device="cpu")
        if isinstance(content, MemoryLayout)
        else _value((kind, content))
        for (_, argument), (kind, content) in zip(operator.inputs, given, strict=True)
    }
    try:
        with torch.no_grad():
            made = operator.call(**named)
            shape = torch.broadcast_shapes(*(one.sizes for one in layouts))  # type: ignore[no-untyped-call]
    except Exception as error:
        let_through(error)
        return None  # it is tried again on tensors without memory, whose error is shown
    return (made.dtype, tuple(shape)) if isinstance(made, torch.Tensor) else None


def _varies(body: Body, index: int) -> bool:
    """Return whether a value is known only at run time."""
    content = body.values[index].content
    return (
        index in body.results
        or (index in body.inputs and content is None)
        or (isinstance(content, Tensor) and content.dynamic)
    )


def _describe(body: Body, index: int) -> _Described:
    kind, content = body.values[index].kind, body.values[index].content
    if isinstance(content, Tensor):
        return kind, MemoryLayout(content.dtype, content.sizes, content.dim_order)
    if kind in (K.INT_LIST, K.TENSOR_LIST, K.OPTIONAL_TENSOR_LIST) and isinstance(content, tuple):
        return kind, tuple((K.NULL, None) if item == -1 else _describe(body, int(item)) for item in content)
    return kind, content


def _value(described: _Described) -> Any:
    kind, content = described
    if isinstance(content, MemoryLayout):
        return _meta(content.dtype, content.sizes, content.dim_order)
    if kind in (K.INT_LIST, K.TENSOR_LIST, K.OPTIONAL_TENSOR_LIST):
        return [_value(item) for item in content]
    if kind == K.BOOL_LIST:
        return [bool(item) for item in content]
    return list(content) if isinstance(content, tuple) else content


@lru_cache(maxsize=4096)
def _meta(dtype: torch.dtype, sizes: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(sizes, strides(sizes, order), dtype=dtype, device="meta")
