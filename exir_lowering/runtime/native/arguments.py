"""The values that the runtime calls a payload with, as a delegate gets them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from exir_lowering.errors import BackendFailure, InputError
from exir_lowering.pte.value_kinds import DTYPES, NULL, TENSOR, Tensor, ValueSpec
from exir_lowering.runtime.contract import DAMAGED, Handle, refuse_list
from exir_lowering.runtime.native import abi
from exir_lowering.runtime.native.abi import Argument

_WRITABLE = 0x200  # PyBUF_WRITE

_memory: Callable[[int, int, int], memoryview] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))


def read_argument(handle: Handle, index: int, argument: Argument) -> Any:
    """Return an input of a delegate; a tensor is on the runtime's memory.

    Raise a BackendFailure for a list, a str or an unknown element type, an InputError for a tensor without memory.
    """
    kind = argument.kind
    if kind == abi.TENSOR:
        return view_tensor(handle, argument)
    if kind == abi.INT:
        return argument.integer
    if kind == abi.DOUBLE:
        return argument.real
    if kind == abi.BOOL:
        return bool(argument.integer)
    if kind == abi.NONE:
        return None
    raise refuse_list(handle, index)


def view_tensor(handle: Handle, argument: Argument) -> torch.Tensor:
    """Return a tensor of the runtime as one of torch, on the same memory.

    Raise a BackendFailure when it is of an unknown element type, an InputError when it has no memory.
    """
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
    if argument.kind != abi.TENSOR:
        return ValueSpec(NULL, None)
    sizes, order = tuple(argument.sizes[: argument.rank]), tuple(range(argument.rank))
    return ValueSpec(TENSOR, Tensor(DTYPES[argument.dtype], sizes, order, dynamic=True, unbound=False))
