"""What the schemas of operators say, and which kernels they have."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

# Which operators tracing keeps in order, by passing tokens.
from torch._higher_order_ops.effects import has_effects as has_effects
from torch._ops import OpOverload as OpOverload

from exir_lowering._upstream.operators import list_arguments

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_HARMLESS = frozenset({torch._C.DispatchKey.Meta, torch._C.DispatchKey.Functionalize})
_BUILT_IN = frozenset({"aten", "prims", "quantized_decomposed", "dim_order_ops", "EDGE_DO_NOT_DECOMP"})


def is_overload(target: Any) -> TypeGuard[OpOverload[..., Any]]:
    """Return whether the target of a call is an operator of torch, and not of Edge dialect."""
    return type(target) is OpOverload


def higher_order_name(target: Any) -> str | None:
    """Return the name of an operator that takes functions, such as "cond"; None for others."""
    return str(target.name()) if isinstance(target, torch._ops.HigherOrderOperator) else None  # type: ignore[no-untyped-call]


def is_built_in(target: Any) -> bool:
    """Return whether a target is a function, or an operator of torch or ExecuTorch, which nobody redefines."""
    return getattr(target, "namespace", "aten") in _BUILT_IN


def packet_name(target: Any) -> str | None:
    """Return what torch makes the name of a retraced call from: the operator's without its overload."""
    return str(target.overloadpacket.__name__) if is_overload(target) else None


def returned_types(target: OpOverload[..., Any]) -> set[str]:
    """Return the types of what an operator returns."""
    return {str(returned.type) for returned in target._schema.returns}


def writes(target: Any) -> bool:
    """Return whether a target is an operator that overwrites an argument."""
    return is_overload(target) and bool(target._schema.is_mutable)


def returns_what_it_overwrites(target: OpOverload[..., Any]) -> bool:
    """Return whether an operator overwrites its first argument only, and returns that."""
    written = [index for index, argument in enumerate(list_arguments(target)) if argument.written]
    returned = [each.alias_info is not None and bool(each.alias_info.is_write) for each in target._schema.returns]
    return written == [0] and returned == [True]


def is_composite(target: Any) -> bool:
    """Return whether an operator is defined by other operators, below autograd too."""
    if not is_overload(target):
        return False
    name: Any = target.name()  # type: ignore[no-untyped-call]
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, _COMPOSITE)) or _COMPOSITE in target.py_kernels


def kernels_in_python(target: OpOverload[..., Any]) -> bool:
    """Return whether an operator has kernels in Python that change what a call of it is traced as."""
    return not _HARMLESS.issuperset(target.py_kernels)


def returns_view(target: Any) -> bool:
    """Return whether an operator returns views of its arguments, and writes nothing."""
    if not is_overload(target) or target._schema.is_mutable:
        return False
    return any(value.alias_info is not None for value in target._schema.returns)


def may_rely_on_memory_order(target: Any) -> bool:
    """Return whether an operator may take for granted how its operands lie in memory: core ATen and views do not."""
    if not is_overload(target) or returns_view(target) or target is torch.ops.aten.reshape.default:
        return False
    return torch.Tag.core not in target.tags


def view_for_copy(target: Any) -> Any:
    """Return ATen's view for an operator that copies it, `reshape` for `view_copy`; the given one if there is none."""
    if not is_overload(target) or target.namespace != "aten":
        return target
    name, overload = packet_name(target), target._overloadname
    if name in (None, "as_strided_copy") or not str(name).endswith("_copy"):
        return target
    if name == "view_copy":
        return torch.ops.aten.reshape.default if overload == "default" else target
    view: Any = getattr(getattr(torch.ops.aten, str(name).removesuffix("_copy"), None), overload, None)
    same = returns_view(view) and [a.name for a in view._schema.arguments] == [a.name for a in target._schema.arguments]
    return view if same else target
