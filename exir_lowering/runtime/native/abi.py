"""What the shim and Python exchange, as `shim.cpp` declares it; the values of a call, as a delegate gets them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch

from exir_lowering.errors import BackendFailure, InputError
from exir_lowering.pte import value_kinds
from exir_lowering.pte.value_kinds import DTYPES, Tensor, ValueSpec
from exir_lowering.runtime.contract import DAMAGED, Handle

NONE, TENSOR, INT, DOUBLE, BOOL = range(5)
"""The kinds of arguments."""


class Spec(ctypes.Structure):
    """A compile spec."""

    _fields_ = (("key", ctypes.c_char_p), ("value", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Argument(ctypes.Structure):
    """A value that a payload is called with."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("sizes", ctypes.POINTER(ctypes.c_int32)),
        ("strides", ctypes.POINTER(ctypes.c_int32)),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("integer", ctypes.c_int64),
        ("real", ctypes.c_double),
        ("value", ctypes.c_void_p),
    )


class Data(ctypes.Structure):
    """Named data of a file."""

    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p))


AVAILABLE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)
COMPILE = ctypes.CFUNCTYPE(
    *(ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    *(ctypes.c_size_t, ctypes.POINTER(Spec), ctypes.c_size_t),
)
EXECUTE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.POINTER(Argument), ctypes.c_size_t, ctypes.c_void_p)
DESTROY = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class Callbacks(ctypes.Structure):
    """What the shim calls."""

    _fields_ = (("available", AVAILABLE), ("compile", COMPILE), ("execute", EXECUTE), ("destroy", DESTROY))


_ARGUMENT = ctypes.POINTER(Argument)
FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    "exir_close": (),
    "exir_event": (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64),
    "exir_named_data": (ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(Data)),
    "exir_register": (ctypes.c_char_p, ctypes.c_int32),
    "exir_release": (ctypes.c_void_p,),
    "exir_resize": (_ARGUMENT, ctypes.POINTER(ctypes.c_int32), ctypes.c_size_t),
    "exir_set_bool": (_ARGUMENT, ctypes.c_int32),
    "exir_set_double": (_ARGUMENT, ctypes.c_double),
    "exir_set_int": (_ARGUMENT, ctypes.c_int64),
    "exir_start": (ctypes.POINTER(Callbacks),),
    "exir_ticks": (),
}
"""The functions of the shim, with the types of what they take."""


def event_functions(library: ctypes.CDLL) -> tuple[Callable[[], int], Callable[..., None]]:
    """Return what tells the time of events, and what records one: for a tracer, by a str or a number, start and end."""
    # They are called with the interpreter's lock held: a delegate's threads may record events too.
    ticks = ctypes.PYFUNCTYPE(ctypes.c_uint64)(("exir_ticks", library))
    return ticks, ctypes.PYFUNCTYPE(None, *FUNCTIONS["exir_event"])(("exir_event", library))


_WRITABLE = 0x200  # PyBUF_WRITE

_memory: Callable[[int, int, int], memoryview] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))


def read_argument(handle: Handle, index: int, argument: Argument) -> Any:
    """Return an input of a delegate; a tensor is on the runtime's memory."""
    if argument.kind == TENSOR:
        return view_tensor(handle, argument)
    values = {INT: argument.integer, DOUBLE: argument.real, BOOL: bool(argument.integer), NONE: None}
    if argument.kind in values:
        return values[argument.kind]
    raise BackendFailure(
        f"{handle.who}: its input {index} is a list or a str, which is not passed to Python delegates. Leave the "
        "operator that takes it to the host."
    )


def view_tensor(handle: Handle, argument: Argument) -> torch.Tensor:
    """Return a tensor of the runtime as one of torch, on the same memory."""
    rank = argument.rank
    dtype = DTYPES.get(argument.dtype)
    if dtype is None:
        raise BackendFailure(f"{handle.who} is given a tensor of the unknown element type {argument.dtype}.")
    sizes, strides, size = argument.sizes[:rank], argument.strides[:rank], argument.bytes
    if size == 0:
        return torch.empty_strided(sizes, strides, dtype=dtype)
    if not argument.data:
        raise InputError(f"{handle.who}: a tensor of shape {sizes} has no memory: {DAMAGED}")
    return torch.frombuffer(_memory(argument.data, size, _WRITABLE), dtype=dtype).as_strided(sizes, strides)


def describe_argument(argument: Argument) -> ValueSpec:
    """Return what an argument says about itself, like a file that says less than it could."""
    if argument.kind != TENSOR:
        return ValueSpec(value_kinds.NULL, None)
    sizes, order = tuple(argument.sizes[: argument.rank]), tuple(range(argument.rank))
    return ValueSpec(value_kinds.TENSOR, Tensor(DTYPES[argument.dtype], sizes, order, dynamic=True, unbound=False))
