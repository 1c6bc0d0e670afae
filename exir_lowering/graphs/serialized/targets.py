"""What a node calls, by name: operators that are registered, and functions of a closed table. Nothing is imported."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, MappingProxyType
from typing import Any

import torch

from exir_lowering._upstream.serializing import HigherOrderOperator, find_higher_order, find_overload, name_overload
from exir_lowering.graphs.operators.functions import FUNCTIONS, HIGHER_ORDER, REFUSED
from exir_lowering.graphs.serialized.container import NotSerialisableError

_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "operator.matmul": operator.matmul,
        **{
            name if "." in name else f"operator.{name}": function
            for name, function in FUNCTIONS.items()
            if function.__module__ != "builtins"
        },
    }
)
_NAMES = {function: name for name, function in _FUNCTIONS.items()}


def name_target(target: Any, *, called: bool = True) -> list[str]:
    """Return the kind and name of what is `called`, or noted; NotSerialisableError unless `find_target` finds it."""
    named = name_overload(target)
    if named is not None:
        found = list(named)
    elif isinstance(target, HigherOrderOperator):
        found = ["higher_order", str(target)]
    else:
        try:
            found = ["function", _NAMES.get(target, "")]
        except TypeError:  # not hashable
            found = ["function", ""]
    try:
        registered = find_target(*found)
        same = registered is target or (not called and name_overload(registered) == name_overload(target))
    except (LookupError, ValueError, TypeError):
        same = False
    if not same:
        raise NotSerialisableError(f"a node calls {str(target)[:200]}, which no other process would find by its name")
    return found


def find_target(kind: str, name: str) -> Any:
    """Return what a node calls; LookupError if it is not registered in this process, or not in the closed tables."""
    if kind == "function":
        return _FUNCTIONS[name]
    if kind == "higher_order":
        if name not in HIGHER_ORDER:
            raise LookupError(f"the higher-order operator {name[:200]!r} is not supported")
        return find_higher_order(name)
    if name.partition(".")[0] in REFUSED:
        raise LookupError(f"{name!r} does more than to compute")
    return find_overload(kind, name)


_SOURCES = ("torch", "torch.nn.functional", "_operator", "math", "torch._C._nn")


def name_source(value: Any) -> str:
    """Return the name of a function or class in a node's `source_fn_stack`."""
    return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', value)}"


def find_source(name: str) -> Any:
    """Return a function or layer that a loaded module of PyTorch defines, for comparisons; for any other, its name."""
    module_name, _, attribute = name.partition(":")
    if module_name in _SOURCES or module_name.startswith("torch.nn.modules."):
        module = sys.modules.get(module_name)
        found = vars(module).get(attribute) if module is not None else None
        layer = isinstance(found, type) and issubclass(found, torch.nn.Module)
        if (layer or isinstance(found, (FunctionType, BuiltinFunctionType))) and name_source(found) == name:
            return found
    return name.replace(":", ".")
