"""Operators of a file, called in PyTorch: those of ATen by their schemas, those of ExecuTorch by functions here.

They compute in the memory of a method, laid out as the file plans it: tensors are parts of one piece of memory for each
arena, at the offsets in the file. What overlaps there overlaps here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from exir_lowering._upstream import installed
from exir_lowering._upstream.operators import Argument, Operator, defining, find_operator
from exir_lowering.graphs.operators import pure as pure_operators
from exir_lowering.graphs.operators.budget import Budget
from exir_lowering.graphs.operators.calls import CheckedCall, size_of
from exir_lowering.pte.code import Storage
from exir_lowering.pte.kernel_signatures import signature
from exir_lowering.pte.value_kinds import (
    BOOL_LIST,
    INT_LIST,
    OPTIONAL_TENSOR_LIST,
    TENSOR_LIST,
    Tensor,
    ValueSpec,
    strides,
)

_NAMESPACE = "quantized_decomposed"

Function = Callable[..., Any]
"""Takes the values of a call without what is written, and then the type of the first of those; returns the results."""


def find_function(kernel: str) -> Function | None:
    """Return what computes a kernel, such as "add.out"; None if it is unknown."""
    if kernel in _QUANTIZED:
        return _QUANTIZED[kernel]
    name, overload = _OF_PYTORCH.get(kernel, ("", ""))
    for _ in defining(_NAMESPACE) if name else ():
        found = find_operator(_NAMESPACE, name, overload)
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


def _embed(bits: int) -> Function:
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


_QUANTIZED: Mapping[str, Function] = {
    "add.out": _add,
    "mixed_mm.out": _mixed_mm,
    "mixed_linear.out": _mixed_linear,
    **{
        f"embedding_{name}.{overload}": _embed(bits)
        for name, bits in (("byte", 8), ("4bit", 4), ("2bit", 2))
        for overload in ("out", "dtype_out")
    },
}
"""What PyTorch has no operator for."""


class DoesNotFit(Exception):
    """A tensor was to get a shape that the file has no memory for, or to be written although it is part of the file."""


@dataclass(slots=True, eq=False)
class Slot:
    """A tensor of a method, which several values may share."""

    tensor: torch.Tensor  # always the same object; its shape changes where the file says that it may
    plan: Tensor  # what the file says about it
    constant: bool = False  # whether its memory is the file's own, which nothing may write

    def reshape(self, shape: Sequence[int]) -> None:
        """Give the tensor a shape, on the memory that it has; raise DoesNotFit when the file has none for it."""
        if tuple(self.tensor.shape) == tuple(shape):
            return
        self.check(shape)
        if self.plan.unbound:
            self.tensor.resize_(tuple(shape))
        self._lay(self.tensor, shape)

    def view(self, source: Slot, shape: Sequence[int]) -> None:
        """Put the tensor, in a shape, onto the memory of another one; raise DoesNotFit for a shape against the file."""
        self.check(shape)
        self._lay(source.tensor, shape)
        self.constant = source.constant

    def check_writable(self) -> None:
        """Raise DoesNotFit when the tensor may not be written: its memory is part of the file."""
        if self.constant:
            raise DoesNotFit("a tensor whose content is part of the file would be written; the file may be damaged")

    def clear(self) -> None:
        """Make the tensor empty, so that an operator may give it a shape; not one whose shape is fixed."""
        if self.plan.dynamic and self.tensor.numel():
            self.tensor.resize_(0)

    def settle(self) -> None:
        """Lay the tensor out as the file says, in the shape that an operator gave it, or raise DoesNotFit."""
        tensor, shape = self.tensor, tuple(self.tensor.shape)
        self.check(shape)
        if self.plan.dynamic and tensor.stride() != strides(shape, self.plan.dim_order):
            content = tensor.clone()
            self._lay(tensor, shape)
            tensor.copy_(content)

    def write(self, content: torch.Tensor) -> None:
        """Give the tensor the shape and the content of another one, or raise DoesNotFit."""
        self.check_writable()
        self.reshape(content.shape)
        self.tensor.copy_(content)

    def check(self, shape: Sequence[int]) -> None:
        """Raise DoesNotFit when the tensor may not have a shape."""
        plan = self.plan
        if plan.unbound:
            return
        if plan.misfit(shape) is not None:
            raise DoesNotFit(
                f"a tensor would get the shape {list(shape)}, but the file says {'at most ' if plan.dynamic else ''}"
                f"{list(plan.sizes)}"
            )

    def _lay(self, source: torch.Tensor, shape: Sequence[int]) -> None:
        self.tensor.set_(
            source.untyped_storage(), source.storage_offset(), tuple(shape), strides(shape, self.plan.dim_order)
        )


def allocate_arenas(sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return memory of the planned sizes, all zeros; raise DoesNotFit when there is not enough."""
    return [_zeros(size, torch.uint8) for size in sizes]


def _zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.zeros(size, dtype=dtype)
    except RuntimeError as error:
        raise DoesNotFit(f"{size} elements of {dtype} do not fit into memory: {error}") from None


def make_slot(plan: Tensor, storage: Storage, memory: Sequence[torch.Tensor], named: Mapping[str, memoryview]) -> Slot:
    """Make a tensor, with its initial content; `memory` is what was planned. DoesNotFit: there is not enough."""
    shape = (0,) * len(plan.sizes) if plan.unbound else plan.sizes
    layout = strides(shape, plan.dim_order)
    planned, content = storage.planned, storage.content if storage.name is None else named[storage.name]
    if planned is not None:
        tensor = torch.empty(0, dtype=plan.dtype)
        end = planned.offset + math.prod(shape) * plan.dtype.itemsize
        # A storage of its own, that shares the memory: as_strided_copy counts from where the storage starts.
        own = memory[planned.arena].untyped_storage()[planned.offset : end]
        tensor.set_(own, 0, shape, layout)
        if content is not None:
            tensor.copy_(_content(plan, shape, layout, content))
    elif content is not None:
        return Slot(_content(plan, shape, layout, content), plan, constant=True)
    else:
        tensor = _zeros(math.prod(shape), plan.dtype).as_strided(shape, layout)
    return Slot(tensor, plan)


def _content(plan: Tensor, shape: Any, layout: Any, content: memoryview) -> torch.Tensor:
    count = math.prod(shape)
    if not count:
        return torch.empty_strided(shape, layout, dtype=plan.dtype)
    return torch.frombuffer(content, dtype=plan.dtype, count=count).as_strided(shape, layout)


Kernel = Callable[["MethodState", tuple[int, ...]], None]

_TIMES = 16
"""How many times the memory of its tensors a quantised kernel takes at most, as floats."""


@dataclass(slots=True, eq=False)
class MethodState:
    """The values of a method while it runs; they stay as they are until it runs again."""

    plan: Sequence[ValueSpec]  # what the file says about each value
    values: list[Any]  # tensors as `Slot`, numbers, strings and None as they are
    spending: Budget = field(default_factory=Budget)  # the memory that operators take

    def get(self, index: int) -> Any:
        """Return a value as an operator takes it."""
        kind, content = self.plan[index].kind, self.plan[index].content
        if isinstance(content, tuple):
            if kind == BOOL_LIST:
                return [bool(item) for item in content]
            if kind in (INT_LIST, TENSOR_LIST, OPTIONAL_TENSOR_LIST):
                return [None if item < 0 else self.get(int(item)) for item in content]
            return list(content)
        value = self.values[index]
        return value.tensor if isinstance(value, Slot) else value

    def slot(self, index: int) -> Slot:
        """Return a tensor; raise a TypeError when the value is something else."""
        value = self.values[index]
        if not isinstance(value, Slot):
            raise TypeError(f"value {index} is {value!r}, expected a tensor")
        return value

    def slots(self, index: int) -> list[Slot]:
        """Return a tensor, or those in a list of tensors."""
        content = self.plan[index].content
        return [self.slot(int(item)) for item in content] if isinstance(content, tuple) else [self.slot(index)]

    def put(self, index: int, result: Any) -> None:
        """Write the result of an operator."""
        if not isinstance(result, torch.Tensor):
            self.values[index] = result
            return
        slot = self.slot(index)
        if result.data_ptr() != slot.tensor.data_ptr() or result.shape != slot.tensor.shape:
            slot.write(result)


def find_kernel(name: str, overload: str) -> Kernel | None:
    """Return what executes an operator: of the closed list, or one that a library gave the runtime; None for others."""
    if (name, overload) in _OWN:
        return _OWN[name, overload]
    if (name, overload) in _NUMBERS:
        return _of_numbers(_NUMBERS[name, overload])
    namespace, _, base = name.partition("::")
    if namespace == _NAMESPACE:
        function, taken = find_function(f"{base}.{overload}"), signature(name, overload)
        return None if function is None or taken is None else _of_function(function, taken.written)
    found = pure_operators.find_kernel(namespace, base, overload)
    full = f"{name}.{overload}" if overload else name
    if found is None and namespace != "aten" and full in (installed.kernels() or ()):
        found = find_operator(namespace, base, overload or "default")
    return None if found is None else _of_torch(base, found)


def _of_torch(name: str, operator: Operator) -> Kernel:
    """Return a kernel of an operator of torch."""
    call = CheckedCall(name, operator)
    arguments: tuple[Argument, ...] = operator.arguments

    def run(state: MethodState, indices: tuple[int, ...]) -> None:
        given: list[Any] = []
        named: dict[str, Any] = {}
        outputs: list[Slot] = []
        for index, argument in zip(indices, arguments, strict=False):
            if argument.written:
                for slot in state.slots(index):
                    slot.check_writable()
            if argument.out:
                outputs += state.slots(index)
                named[argument.name] = state.get(index)
            elif argument.keyword:
                named[argument.name] = state.get(index)
            else:
                given.append(state.get(index))
        for slot in outputs:
            slot.clear()
        state.spending.take(call.needs(given, named))
        result = call(*given, **named)
        for slot in outputs:
            slot.settle()
        if not outputs and len(indices) > len(arguments):
            state.put(indices[len(arguments)], result)

    return run


def _of_function(function: Function, written: frozenset[int]) -> Kernel:
    """Return a kernel of a function that returns what is written, to the last arguments."""
    first = min(written)

    def run(state: MethodState, indices: tuple[int, ...]) -> None:
        given = [state.get(index) for index in indices[:first]]
        slots = [state.slot(index) for index in indices[first : first + len(written)]]
        for slot in slots:
            slot.check_writable()
        state.spending.take(_TIMES * size_of((given, [slot.tensor for slot in slots])))
        made = function(*given, slots[0].plan.dtype)
        for slot, result in zip(slots, made if isinstance(made, tuple) else (made,), strict=True):
            slot.write(result)

    return run


def _of_numbers(function: Callable[..., Any]) -> Kernel:
    def run(state: MethodState, indices: tuple[int, ...]) -> None:
        state.values[indices[-1]] = function(*map(state.get, indices[:-1]))

    return run


def _view(state: MethodState, indices: tuple[int, ...]) -> None:
    slot, target = state.slot(indices[0]), state.slot(indices[2])
    source, shape = slot.tensor, list(state.get(indices[1]))
    if -1 in shape:
        known = -math.prod(shape)
        shape[shape.index(-1)] = source.numel() // known if known else 0
    if math.prod(shape) != source.numel():
        raise DoesNotFit(f"a tensor of shape {list(source.shape)} cannot be viewed with the shape {shape}")
    target.view(slot, shape)


def _copy_row(state: MethodState, indices: tuple[int, ...]) -> None:
    target, row, index = state.slot(indices[0]), state.slot(indices[1]).tensor, state.get(indices[2])
    target.check_writable()
    if target.plan.dynamic:
        target.reshape((index + 1, *row.shape))
    target.tensor[index].copy_(row)


def _copy(state: MethodState, indices: tuple[int, ...]) -> None:
    state.slot(indices[-1]).write(state.slot(indices[0]).tensor)


def _empty(state: MethodState, indices: tuple[int, ...]) -> None:
    state.slot(indices[-1]).reshape(state.get(indices[0]))


def _nothing(state: MethodState, indices: tuple[int, ...]) -> None:
    return None


_OWN: Mapping[tuple[str, str], Kernel] = {
    ("executorch_prim::et_view", "default"): _view,
    ("executorch_prim::et_copy_index", "tensor"): _copy_row,
    ("dim_order_ops::_to_dim_order_copy", "out"): _copy,
    ("dim_order_ops::_clone_dim_order", "out"): _copy,
    ("dim_order_ops::_empty_dim_order", "out"): _empty,
    ("et_copy::_h2d_copy", "out"): _copy,
    ("et_copy::_d2h_copy", "out"): _copy,
    ("aten::sym_constrain_range", ""): _nothing,
    ("aten::sym_constrain_range_for_size", ""): _nothing,
}
_PRIMITIVES: Mapping[str, Callable[..., Any]] = {
    **{
        name: getattr(operator, name)
        for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "eq", "ge", "gt", "le", "lt")
    },
    "ceil": math.ceil,
    "round": round,
    "trunc": math.trunc,
    "sym_float": float,
    "sym_int": int,
    "sym_max": max,
    "sym_min": min,
    "sym_not": operator.not_,
    "sym_ite": lambda condition, yes, no: yes if condition else no,
}
_NUMBERS: Mapping[tuple[str, str], Callable[..., Any]] = {
    **{
        (f"executorch_prim::{name}", overload): function
        for name, function in _PRIMITIVES.items()
        for overload in ("Scalar", "int")
    },
    ("aten::sym_size", "int"): lambda tensor, dim: tensor.shape[dim],
    ("aten::sym_stride", "int"): lambda tensor, dim: tensor.stride(dim),
    ("aten::sym_numel", ""): lambda tensor: tensor.numel(),
    ("aten::_local_scalar_dense", ""): lambda tensor: tensor.item(),
}
