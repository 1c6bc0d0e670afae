"""Operators of torch: their names, their schemas, the operators of a file; nothing here needs ExecuTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeGuard

import torch
from torch._ops import HigherOrderOperator, OpOverload as OpOverload  # the classes of operators


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of an operator, as its schema says."""

    name: str
    type: str  # in TorchScript's notation, such as "Optional[Tensor]"
    written: bool  # the operator writes there
    aliased: bool = False  # the result may share memory with it, or the operator writes there


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of torch."""

    call: Any  # the function that executes it
    arguments: tuple[Argument, ...]
    tags: frozenset[torch.Tag]
    views: bool  # a result may be a view of an argument


@lru_cache(maxsize=4096)
def _operator(call: Any) -> Operator:
    schema = call._schema  # torch has no public way to get it
    arguments = []
    for one in schema.arguments:
        info = one.alias_info
        written = info is not None and bool(info.is_write)
        arguments.append(Argument(one.name, str(one.type), written, info is not None))
    views = any(result.alias_info is not None for result in schema.returns)
    return Operator(call, tuple(arguments), frozenset(call.tags), views)


def list_arguments(target: Any) -> tuple[Argument, ...]:
    """Return the arguments of an operator, in order; none if it has no schema."""
    target = wrapped_operator(target)
    return _operator(target).arguments if hasattr(target, "_schema") else ()


def defining(namespace: str) -> Iterator[None]:
    """Look up an operator, once more after each import of a module that registers operators of its namespace."""
    yield
    quantized = ("torch.ao.quantization.fx._decomposed", "executorch.exir")  # torch's, before ExecuTorch's compiler's
    for module in quantized if namespace == "quantized_decomposed" else ():
        import_module(module)
        yield


def find_operator(namespace: str, name: str, overload: str) -> Operator | None:
    """Return a registered operator, such as "aten", "add", "Tensor" (or "default"); None if none has that name."""
    found: Any = torch.ops
    try:
        for part in (namespace, name, overload):
            found = getattr(found, part)
    except (AttributeError, RuntimeError):
        return None
    return _operator(found) if isinstance(found, OpOverload) else None  # names may also lead to something else


def wrapped_operator(target: Any) -> Any:
    """Return the ATen operator that an Edge operator wraps; torch's own operators have something else under `_op`."""
    return target if isinstance(target, OpOverload) else getattr(target, "_op", target)


def operator_name(target: Any) -> str:
    """Return an operator's name as people write it, such as `aten.add.Tensor`; Edge operators wrap the ATen one."""
    op = wrapped_operator(target)
    if isinstance(op, (OpOverload, HigherOrderOperator)):
        return str(op)
    return str(getattr(op, "__name__", op))


def identify_operator(target: Any) -> str | None:
    """Return what identifies an operator or a built-in function in any process, with its schema; None for others."""
    op = wrapped_operator(target)
    kind = f"{type(target).__module__}.{type(target).__qualname__}"
    if isinstance(op, OpOverload):
        return f"{kind} {op} {op._schema}"
    if isinstance(op, HigherOrderOperator):
        return f"{kind} {op}"
    module, name = getattr(op, "__module__", None), getattr(op, "__qualname__", "<")
    known = module in ("_operator", "operator", "math", "builtins") and "<" not in name
    return f"{kind} {module}.{name}" if known else None


def operator_packet(target: Any) -> Any:
    """Return an operator without its overload, such as `torch.ops.aten.add`; Edge operators wrap the ATen one."""
    op = wrapped_operator(target)
    return getattr(op, "overloadpacket", op)


def bind(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the type and the value of each argument of a call, in the order of the operator's schema."""
    for number, argument in enumerate(wrapped_operator(target)._schema.arguments):
        given = args[number] if number < len(args) else kwargs.get(argument.name, argument.default_value)
        yield str(argument.type), given


def draws_numbers(target: Any) -> bool:
    """Return whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(wrapped_operator(target), "tags", ())


def mutates_arguments(target: Any) -> bool:
    """Return whether an operator writes into its arguments; False if it has no schema."""
    schema = getattr(wrapped_operator(target), "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def list_registered_operators() -> list[str]:
    """Return the dispatcher's names of operators, such as "aten::add.Tensor"; attribute look-ups create some."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return names


def known_operators() -> frozenset[str]:
    """Return the names of all operators that are registered, such as `aten.add.Tensor`."""
    names = (name.replace("::", ".") for name in list_registered_operators())
    return frozenset(name if name.count(".") > 1 else f"{name}.default" for name in names)


def written_arguments(target: Any) -> tuple[str, ...]:
    """Return the names of the arguments that an operator writes to; empty if it has no schema."""
    return tuple(one.name for one in list_arguments(target) if one.written)


def is_view(target: Any) -> bool:
    """Return whether an operator returns a view of its first argument."""
    return bool(getattr(wrapped_operator(target), "is_view", False))


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_BUILT_IN = frozenset({"aten", "prims", "quantized_decomposed", "dim_order_ops", "EDGE_DO_NOT_DECOMP"})


def is_overload(target: Any) -> TypeGuard[OpOverload[..., Any]]:
    """Return whether the target of a call is an operator of torch, and not of Edge dialect."""
    return type(target) is OpOverload


def higher_order_name(target: Any) -> str | None:
    """Return the name of an operator that takes functions, such as "cond"; None for others."""
    return str(target.name()) if isinstance(target, HigherOrderOperator) else None  # type: ignore[no-untyped-call]


def is_built_in(target: Any) -> bool:
    """Return whether a target is a function, or an operator of torch or ExecuTorch, which nobody redefines."""
    return getattr(target, "namespace", "aten") in _BUILT_IN


def packet_name(target: Any) -> str | None:
    """Return what torch makes the name of a retraced call from: the operator's without its overload."""
    return str(target.overloadpacket.__name__) if is_overload(target) else None


def is_composite(target: Any) -> bool:
    """Return whether an operator is defined by other operators, below autograd too."""
    if not is_overload(target):
        return False
    name: Any = target.name()  # type: ignore[no-untyped-call]
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, _COMPOSITE)) or _COMPOSITE in target.py_kernels


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


def on_host(target: Any) -> Any:
    """Return PyTorch's operator for one of the Edge dialect; a copy of a view becomes the view, or `reshape`."""
    target = wrapped_operator(target)
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


# ExecuTorch's operators that its runtime has kernels for, but that only its compiler registers with torch. A file is
# checked against them before it runs, also in a process without the compiler. They cannot be registered here: the
# compiler, if it is imported later, would register them again, which is an error.

_EMBEDDING = (
    "Tensor weight, Tensor weight_scales, Tensor? weight_zero_points, "
    "int weight_quant_min, int weight_quant_max, Tensor indices, *, "
)
_SCHEMAS = (
    "dim_order_ops::_to_dim_order_copy.out("
    "Tensor self, *, bool non_blocking=False, int[]? dim_order=None, Tensor(a!) out) -> Tensor(a!)",
    "dim_order_ops::_empty_dim_order.out(int[] size, *, int[]? dim_order=None, Tensor(a!) out) -> Tensor(a!)",
    "dim_order_ops::_clone_dim_order.out("
    "Tensor self, *, bool non_blocking=False, int[]? dim_order=None, Tensor(a!) out) -> Tensor(a!)",
    *(
        f"quantized_decomposed::embedding_{bits}.{overload}({_EMBEDDING}{dtype}Tensor(a!) out) -> Tensor(a!)"
        for bits in ("byte", "4bit", "2bit")
        for overload, dtype in (("out", ""), ("dtype_out", "ScalarType? dtype=None, "))
    ),
)


def executorch_schema(name: str, overload: str) -> Any:
    """Return the schema of an operator ("dim_order_ops::_clone_dim_order", "out"); None if it is not one of these."""
    found = (text for text in _SCHEMAS if text.startswith(f"{name}.{overload}("))
    return next(map(torch._C.parse_schema, found), None)
