"""What kernels take and write: they end the process, or write anywhere, when they are called with anything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from exir_lowering._upstream.runtime import operator_schema
from exir_lowering.pte.slots import KernelTypes as K

Kinds = frozenset[int]
ANYTHING: Kinds = frozenset()

_NUMBER: Kinds = frozenset({K.INT, K.BOOL, K.DOUBLE})
# What kernels take for the types of schemas.
_ACCEPTED: Mapping[str, Kinds] = {
    "Tensor": frozenset({K.TENSOR}),
    "int": frozenset({K.INT}),
    "float": frozenset({K.DOUBLE}),
    "bool": frozenset({K.BOOL}),
    "number": _NUMBER,
    "str": frozenset({K.STRING}),
    "List[Tensor]": frozenset({K.TENSOR_LIST}),
    "List[Optional[Tensor]]": frozenset({K.TENSOR_LIST, K.OPTIONAL_TENSOR_LIST}),
    "List[int]": frozenset({K.INT_LIST}),
    "List[float]": frozenset({K.DOUBLE_LIST}),
    "List[bool]": frozenset({K.BOOL_LIST}),
}


@dataclass(frozen=True, slots=True)
class Signature:
    """What a kernel takes."""

    types: tuple[str, ...]  # of its arguments, as TorchScript names them
    accepted: tuple[Kinds, ...]  # the kinds of values for each of them; `ANYTHING` where that is not known
    written: frozenset[int]  # which of them it writes to
    results: int  # how many values follow its arguments in a call: what it returns


@lru_cache(maxsize=1024)
def signature(name: str, overload: str) -> Signature | None:
    """Return what a kernel takes, None when that is not known; its name has the namespace, such as "aten::add"."""
    own = _OWN.get((name, overload))
    if own is not None:
        return own
    schema = operator_schema(name, overload)
    if schema is None:
        return None
    types, written, results = schema
    return Signature(types, tuple(map(_accept, types)), written, results)


def _accept(type_: str) -> Kinds:
    """Return the kinds of values that a kernel accepts for a type of a schema; `ANYTHING` when that is not known."""
    optional = type_.startswith("Optional[")
    kinds = _ACCEPTED.get(type_[len("Optional[") : -1] if optional else type_)
    if kinds is None:
        return ANYTHING
    return kinds | {K.NULL} if optional else kinds


def _describe(*types: str, written: tuple[int, ...] = (), results: int = 1) -> Signature:
    return Signature(types, tuple(map(_accept, types)), frozenset(written), results)


_TWO = ("add", "sub", "mul", "floordiv", "mod", "sym_max", "sym_min", "truediv", "eq", "ge", "gt", "le", "lt")
_ONE = ("neg", "ceil", "round", "trunc", "sym_float", "sym_int")
_PRIMITIVES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_TWO, ("number", "number")),
    **dict.fromkeys(_ONE, ("number",)),
    "sym_not": ("bool",),
    "sym_ite": ("bool", "number", "number"),
}
# ExecuTorch's own, which have no schemas.
_OWN: Mapping[tuple[str, str], Signature] = {
    ("executorch_prim::et_view", "default"): _describe("Tensor", "List[int]", "Tensor", results=0),
    ("executorch_prim::et_copy_index", "tensor"): _describe("Tensor", "Tensor", "int", written=(0,), results=0),
    ("et_copy::_h2d_copy", "out"): _describe("Tensor", "Tensor", written=(1,)),
    ("et_copy::_d2h_copy", "out"): _describe("Tensor", "Tensor", written=(1,)),
    **{
        (f"executorch_prim::{name}", overload): _describe(*types)
        for name, types in _PRIMITIVES.items()
        for overload in ("Scalar", "int")
    },
}
