"""Arguments and metadata as JSON: plain values, and what only a compiler has: nodes, operators, fake tensors, sizes.

What a node calls is written by name: a registered operator, or a function of a closed table. Nothing is imported.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import sympy
import torch
from torch.fx import Node

from exir_lowering._upstream import serializing
from exir_lowering._upstream.likeness import SYMBOLS
from exir_lowering.graphs.operators.functions import FUNCTIONS, HIGHER_ORDER, REFUSED
from exir_lowering.graphs.serialized import expressions, plain
from exir_lowering.graphs.serialized.container import NotSerialisableError, pick
from exir_lowering.graphs.serialized.fake_values import FakeReader, FakeWriter
from exir_lowering.graphs.serialized.plain import PlainReader, PlainWriter
from exir_lowering.graphs.serialized.tensors import DTYPES, TensorReader, TensorWriter, name_dtype

_LONG = 32
"""From which length on a text is written once, and referred to."""

_LAYOUTS = {"strided": torch.strided, "sparse_coo": torch.sparse_coo, "sparse_csr": torch.sparse_csr}
_DEVICE = re.compile(r"[a-z]{1,12}(:[0-9]{1,3})?", re.ASCII)


class ValueWriter(PlainWriter):
    """Writes values, and collects what they refer to."""

    dtypes, layouts, devices = DTYPES, _LAYOUTS, _DEVICE

    def __init__(self, tensors: TensorWriter, fakes: FakeWriter) -> None:
        super().__init__()
        self.nodes: Mapping[Node, int] = {}  # of the current graph, with their numbers
        self.texts: dict[str, int] = {}  # long ones, with their numbers
        self.operators: dict[tuple[str, ...], int] = {}  # their kinds and names, with their numbers
        self._tensors, self._fakes = tensors, fakes
        self._targets: dict[tuple[int, bool], tuple[Any, int]] = {}  # with the operator, which stays alive
        own: dict[type, Callable[[Any, int], Any]] = {
            str: lambda value, depth: self.text(value),
            Node: self._node,
            torch.Size: lambda value, depth: {"size": self.list(value, depth)},
            set: lambda value, depth: {"set": sorted(self.list(value, depth), key=repr)},
            slice: lambda value, depth: {"slice": self.list((value.start, value.stop, value.step), depth)},
            torch.dtype: lambda value, depth: {"dtype": name_dtype(value)},
            serializing.FakeTensor: lambda value, depth: {"fake": self._fakes.write(value)},
            serializing.TensorMetadata: lambda value, depth: {"metadata": self.list(value, depth)},
            serializing.ValueRanges: lambda value, depth: {"ranges": self._fakes.bounds(value)},
            **dict.fromkeys(SYMBOLS, lambda value, depth: self._fakes.write_number(value)),
        }
        self.writers |= own

    def target(self, target: Any, *, called: bool = True) -> int:
        """Return the number of an operator."""
        known = self._targets.get((id(target), called))
        if known is None:
            number = self.operators.setdefault(tuple(name_target(target, called=called)), len(self.operators))
            known = self._targets[id(target), called] = (target, number)
        return known[1]

    def text(self, text: str) -> Any:
        """Write a text."""
        return text if len(text) < _LONG else {"text": self.texts.setdefault(text, len(self.texts))}

    def rare(self, value: Any) -> Any:
        """Write a tensor, a size, or an operator."""
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensors.write(value)}
        if isinstance(value, sympy.Basic):
            return {"expression": expressions.write(value, self._fakes.symbols)}
        # Our conversion notes Python's own operators as the origins of nodes, too.
        if serializing.name_overload(value) is not None or isinstance(value, BuiltinFunctionType):
            return {"operator": self.target(value, called=False)}
        return super().rare(value)

    def _node(self, node: Node, depth: int) -> Any:
        number = self.nodes.get(node)
        if number is None:
            raise NotSerialisableError(
                f"a reference to the node {node.name!r}, which is not an earlier one of its graph"
            )
        return {"%": number}


class ValueReader(PlainReader):
    """Reads what `ValueWriter` wrote."""

    dtypes, layouts, devices = DTYPES, _LAYOUTS, _DEVICE

    def __init__(self, tree: Mapping[str, Any], tensors: TensorReader, fakes: FakeReader) -> None:
        super().__init__()
        self.nodes: list[Node] = []  # of the current graph, that are made so far
        self._texts = tree["texts"]
        if not all(isinstance(text, str) for text in self._texts):
            raise ValueError("a text is not a str")
        self._operators = [find_target(*fields) for fields in tree["operators"]]
        many, of_length = self.many, plain.of_length
        self.readers |= {
            "%": lambda content, depth: pick(self.nodes, content),
            "fake": lambda content, depth: fakes.read(content),
            "text": lambda content, depth: pick(self._texts, content),
            "operator": lambda content, depth: pick(self._operators, content),
            "size": lambda content, depth: torch.Size(many(content, depth)),
            "set": lambda content, depth: set(many(content, depth)),
            "slice": lambda content, depth: slice(*of_length(3, many(content, depth))),
            "metadata": lambda content, depth: serializing.TensorMetadata(*many(content, depth)),
            "ranges": lambda content, depth: serializing.ValueRanges(*map(fakes.expression, of_length(2, content))),
            "tensor": lambda content, depth: tensors.read(content),
            "expression": lambda content, depth: fakes.expression(content),
            "number": lambda content, depth: fakes.read_number(content),
        }

    def target(self, number: Any) -> Any:
        """Return an operator."""
        return pick(self._operators, number)


# -- what a node calls ------------------------------------------------------------------------------------------------

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "operator.matmul": operator.matmul,
    **{
        name if "." in name else f"operator.{name}": function
        for name, function in FUNCTIONS.items()
        if function.__module__ != "builtins"
    },
}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}


def name_target(target: Any, *, called: bool = True) -> list[str]:
    """Return the kind and name of what is `called`, or noted; NotSerialisableError unless `find_target` finds it."""
    named = serializing.name_overload(target)
    if named is not None:
        found = list(named)
    elif isinstance(target, serializing.HigherOrderOperator):
        found = ["higher_order", str(target)]
    else:
        try:
            found = ["function", _NAMES.get(target, "")]
        except TypeError:  # not hashable
            found = ["function", ""]
    try:
        registered = find_target(*found)
        same = registered is target or (
            not called and serializing.name_overload(registered) == serializing.name_overload(target)
        )
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
        return serializing.find_higher_order(name)
    if name.partition(".")[0] in REFUSED:
        raise LookupError(f"{name!r} does more than to compute")
    return serializing.find_overload(kind, name)


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
