"""What the shim and Python exchange: structures, callbacks and functions, as `shim.cpp` declares them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

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
    ctypes.c_int64,
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.POINTER(Spec),
    ctypes.c_size_t,
)
EXECUTE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.POINTER(Argument), ctypes.c_size_t, ctypes.c_void_p)
DESTROY = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class Callbacks(ctypes.Structure):
    """What the shim calls."""

    _fields_ = (("available", AVAILABLE), ("compile", COMPILE), ("execute", EXECUTE), ("destroy", DESTROY))


def declare(library: ctypes.CDLL) -> None:
    """Declare the arguments of the shim's functions."""
    library.exir_resize.argtypes = (ctypes.POINTER(Argument), ctypes.POINTER(ctypes.c_int32), ctypes.c_size_t)
    library.exir_set_int.argtypes = (ctypes.POINTER(Argument), ctypes.c_int64)
    library.exir_set_double.argtypes = (ctypes.POINTER(Argument), ctypes.c_double)
    library.exir_set_bool.argtypes = (ctypes.POINTER(Argument), ctypes.c_int32)
    library.exir_named_data.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(Data))
    library.exir_release.argtypes = (ctypes.c_void_p,)


# These are called with the interpreter's lock held: a delegate's threads may record events too.


def clock(library: ctypes.CDLL) -> Callable[[], int]:
    """Return the function that returns the time of events."""
    return ctypes.PYFUNCTYPE(ctypes.c_uint64)(("exir_ticks", library))


def recorder(library: ctypes.CDLL) -> Callable[..., None]:
    """Return the function that records an event: for a tracer, by a str or a number, with start and end."""
    kinds: tuple[Any, ...] = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64)
    return ctypes.PYFUNCTYPE(None, *kinds)(("exir_event", library))
