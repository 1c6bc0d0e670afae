"""What kernels take, and what they write to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from exir_lowering._upstream.runtime import operator_schema


@dataclass(frozen=True, slots=True)
class Signature:
    """What a kernel takes."""

    types: tuple[str, ...]  # of its arguments, as TorchScript names them
    written: frozenset[int] = frozenset()  # which of them it writes to
    results: int = 1  # how many values follow its arguments in a call: what it returns


@lru_cache(maxsize=1024)
def signature(name: str, overload: str) -> Signature | None:
    """Return what a kernel takes, None when that is not known; its name has the namespace, such as "aten::add"."""
    own = _OWN.get((name, overload))
    schema = operator_schema(name, overload) if own is None else None
    return own if schema is None else Signature(*schema)


_NUMBERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("add", "sub", "mul", "floordiv", "mod", "sym_max", "sym_min", "truediv", "eq", "ge", "gt", "le", "lt"),
        ("number", "number"),
    ),
    **dict.fromkeys(("neg", "ceil", "round", "trunc", "sym_float", "sym_int"), ("number",)),
    "sym_not": ("bool",),
    "sym_ite": ("bool", "number", "number"),
}
# ExecuTorch's own, which have no schemas.
_OWN: Mapping[tuple[str, str], Signature] = {
    ("executorch_prim::et_view", "default"): Signature(("Tensor", "List[int]", "Tensor"), results=0),
    ("executorch_prim::et_copy_index", "tensor"): Signature(("Tensor", "Tensor", "int"), frozenset({0}), results=0),
    ("et_copy::_h2d_copy", "out"): Signature(("Tensor", "Tensor"), frozenset({1})),
    ("et_copy::_d2h_copy", "out"): Signature(("Tensor", "Tensor"), frozenset({1})),
    **{
        (f"executorch_prim::{name}", overload): Signature(types)
        for name, types in _NUMBERS.items()
        for overload in ("Scalar", "int")
    },
}
