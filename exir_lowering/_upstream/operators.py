"""Operators of torch: their names, their schemas, the operators of a file; nothing here needs ExecuTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from exir_lowering._upstream import executorch_operators

_OVERLOAD = type(torch.ops.aten.add.Tensor)  # the class is private, its objects are not


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of an operator, as its schema says."""

    name: str
    type: str  # in TorchScript's notation, such as "Optional[Tensor]"
    keyword: bool  # keyword-only
    out: bool  # the operator writes its result there
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
    return Operator(
        call,
        tuple(
            Argument(a.name, str(a.type), a.kwarg_only, a.is_out, *_aliasing(a.alias_info)) for a in schema.arguments
        ),
        frozenset(call.tags),
        any(result.alias_info is not None for result in schema.returns),
    )


def _aliasing(info: Any) -> tuple[bool, bool]:
    return info is not None and bool(info.is_write), info is not None


def list_arguments(target: Any) -> tuple[Argument, ...]:
    """Return the arguments of an operator of torch, in order."""
    return _operator(target).arguments


_DEFINED_BY = {"quantized_decomposed": ("torch.ao.quantization.fx._decomposed", "executorch.exir")}
"""The modules that register the operators of a namespace: torch's before those of ExecuTorch's compiler."""


def defining(namespace: str) -> Iterator[None]:
    """Look up an operator, once more after each import of a module that registers operators of its namespace."""
    yield
    for module in _DEFINED_BY.get(namespace, ()):
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
    return _operator(found) if isinstance(found, _OVERLOAD) else None  # names may also lead to something else


@dataclass(frozen=True, slots=True)
class FunctionalOperator:
    """An operator that returns what an out variant writes."""

    call: Any  # takes its arguments by name
    inputs: tuple[tuple[int, str], ...]  # the out variant's arguments that it takes, with their positions there
    outputs: tuple[int, ...]  # the positions of those that the out variant writes
    dtype: bool  # it takes the dtype of its result


@lru_cache(maxsize=1024)
def functional_operator(name: str, overload: str) -> FunctionalOperator | None:
    """Return the operator that computes an operator of a file without writing the result; None if torch has none."""
    own, schema = executorch_operators.function(name, overload), executorch_operators.schema(name, overload)
    if own is not None:
        given = tuple((position, one.name) for position, one in enumerate(schema.arguments) if not one.is_out)
        written = tuple(position for position, one in enumerate(schema.arguments) if one.is_out)
        return FunctionalOperator(own[0], given, written, own[1])
    for _ in defining(name.partition("::")[0]):
        found = _registered_functional(name, overload)
        if found is not None:
            return found
    return None


def _registered_functional(name: str, overload: str) -> FunctionalOperator | None:
    namespace, _, base = name.partition("::")
    found = find_operator(namespace, base, overload or "default")
    if found is None:
        return None
    inputs = tuple((position, one.name) for position, one in enumerate(found.arguments) if not one.out)
    outputs = tuple(position for position, one in enumerate(found.arguments) if one.out)
    types = [(one.name, one.type) for one in found.arguments if not one.out]
    packet = found.call.overloadpacket
    for other in packet.overloads() if outputs else ():
        schema = getattr(packet, other)._schema
        names = {name for name, _ in types}
        shared = [(one.name, str(one.type)) for one in schema.arguments if one.name in names]
        added = [one for one in schema.arguments if one.name not in names]
        if shared == types and not schema.is_mutable and all(one.has_default_value() for one in added):
            return FunctionalOperator(
                getattr(packet, other), inputs, outputs, any(one.name == "dtype" for one in added)
            )
    return None


def wrapped_operator(target: Any) -> Any:
    """Return the ATen operator that an Edge operator wraps; torch's own operators have something else under `_op`."""
    return target if isinstance(target, torch._ops.OpOverload) else getattr(target, "_op", target)


def operator_name(target: Any) -> str:
    """Return an operator's name as people write it, such as `aten.add.Tensor`; Edge operators wrap the ATen one."""
    op = wrapped_operator(target)
    if isinstance(op, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return str(op)
    return str(getattr(op, "__name__", op))


def identify_operator(target: Any) -> str | None:
    """Return what identifies an operator or a built-in function in any process, with its schema; None for others."""
    op = wrapped_operator(target)
    kind = f"{type(target).__module__}.{type(target).__qualname__}"
    if isinstance(op, torch._ops.OpOverload):
        return f"{kind} {op} {op._schema}"
    if isinstance(op, torch._ops.HigherOrderOperator):
        return f"{kind} {op}"
    module, name = getattr(op, "__module__", None), getattr(op, "__qualname__", "<")
    known = module in ("_operator", "operator", "math", "builtins") and "<" not in name
    return f"{kind} {module}.{name}" if known else None


def operator_packet(target: Any) -> Any:
    """Return an operator without its overload, such as `torch.ops.aten.add`; Edge operators wrap the ATen one."""
    op = wrapped_operator(target)
    return getattr(op, "overloadpacket", op)


def argument_names(target: Any) -> tuple[str, ...]:
    """Return the names of an operator's arguments by position; empty if it has no schema."""
    schema = getattr(wrapped_operator(target), "_schema", None)
    return tuple(argument.name for argument in schema.arguments) if schema is not None else ()


def mutates_arguments(target: Any) -> bool:
    """Return whether an operator writes into its arguments; False if it has no schema."""
    schema = getattr(wrapped_operator(target), "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def known_operators() -> frozenset[str]:
    """Return the names of all operators that are registered, such as `aten.add.Tensor`."""
    names = (name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names())
    return frozenset(name if name.count(".") > 1 else f"{name}.default" for name in names)


def written_arguments(target: Any) -> tuple[str, ...]:
    """Return the names of the arguments that an operator writes to; empty if it has no schema."""
    op = wrapped_operator(target)
    return tuple(one.name for one in (list_arguments(op) if hasattr(op, "_schema") else ()) if one.written)


def is_view(target: Any) -> bool:
    """Return whether an operator returns a view of its first argument."""
    return bool(getattr(wrapped_operator(target), "is_view", False))


def list_registered_operators() -> list[str]:
    """Return the dispatcher's names of operators, such as "aten::add.Tensor"; attribute look-ups create some."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return names
