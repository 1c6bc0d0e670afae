"""Arguments and metadata as JSON: what JSON has is itself, anything else an object whose only key says what it is."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.immutable_collections import immutable_dict, immutable_list

from exir_lowering._upstream import serializing
from exir_lowering.graphs.serialized import expressions, targets
from exir_lowering.graphs.serialized.container import DEEPEST, NotSerialisableError, pick
from exir_lowering.graphs.serialized.fakes import FakeReader, FakeWriter
from exir_lowering.graphs.serialized.tensors import DTYPES, TensorReader, TensorWriter, name_dtype

_NATIVE = (type(None), bool, int)
_LONG = 32
"""From which length on a text is written once, and referred to."""

_LAYOUTS = {"strided": torch.strided, "sparse_coo": torch.sparse_coo, "sparse_csr": torch.sparse_csr}
_FORMATS = {
    name: getattr(torch, name) for name in ("channels_last", "channels_last_3d", "contiguous_format", "preserve_format")
}
_DEVICE = re.compile(r"[a-z]{1,12}(:[0-9]{1,3})?", re.ASCII)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class ValueWriter:
    """Writes values, and collects what they refer to."""

    def __init__(self, tensors: TensorWriter, fakes: FakeWriter) -> None:
        self.nodes: Mapping[Node, int] = {}  # of the current graph, with their numbers
        self.texts: dict[str, int] = {}  # long ones, with their numbers
        self.operators: dict[tuple[str, ...], int] = {}  # their kinds and names, with their numbers
        self._tensors, self._fakes = tensors, fakes
        self._targets: dict[tuple[int, bool], tuple[Any, int]] = {}  # with the operator, which stays alive
        self._writers: dict[type, Callable[[Any, int], Any]] = {
            str: lambda value, depth: self.text(value),
            float: lambda value, depth: value if math.isfinite(value) else {"float": repr(value)},
            complex: lambda value, depth: {"complex": [repr(value.real), repr(value.imag)]},
            Node: self._node,
            list: self._list,
            immutable_list: self._list,
            tuple: lambda value, depth: {"tuple": self._list(value, depth)},
            torch.Size: lambda value, depth: {"size": self._list(value, depth)},
            dict: self._dict,
            OrderedDict: self._dict,
            immutable_dict: self._dict,
            set: self._set,
            slice: lambda value, depth: {"slice": self._list((value.start, value.stop, value.step), depth)},
            torch.dtype: lambda value, depth: {"dtype": name_dtype(value)},
            torch.device: lambda value, depth: {"device": str(value)},
            torch.layout: lambda value, depth: {"layout": _find(_LAYOUTS, value)},
            torch.memory_format: lambda value, depth: {"memory_format": _find(_FORMATS, value)},
            serializing.FakeTensor: lambda value, depth: {"fake": self._fakes.write(value)},
            serializing.TensorMetadata: lambda value, depth: {"metadata": self._list(value, depth)},
            serializing.ValueRanges: self._ranges,
            **dict.fromkeys(_SYMBOLIC, lambda value, depth: self._fakes.write_number(value)),
        }

    def write(self, value: Any, depth: int = 0) -> Any:
        """Write a value; NotSerialisableError if it cannot be written exactly."""
        kind = type(value)
        if kind in _NATIVE:
            return value
        writer = self._writers.get(kind)
        if writer is None:
            return self._rare(value)
        if depth > DEEPEST:
            raise NotSerialisableError(f"a value that nests more than {DEEPEST} deep")
        return writer(value, depth + 1)

    def target(self, target: Any, *, called: bool = True) -> int:
        """Return the number of an operator."""
        known = self._targets.get((id(target), called))
        if known is None:
            number = self.operators.setdefault(tuple(targets.name_target(target, called=called)), len(self.operators))
            known = self._targets[id(target), called] = (target, number)
        return known[1]

    def text(self, text: str) -> Any:
        """Write a text."""
        return text if len(text) < _LONG else {"text": self.texts.setdefault(text, len(self.texts))}

    def _node(self, node: Node, depth: int) -> Any:
        number = self.nodes.get(node)
        if number is None:
            raise NotSerialisableError(
                f"a reference to the node {node.name!r}, which is not an earlier one of its graph"
            )
        return {"%": number}

    def _list(self, value: Sequence[Any], depth: int) -> list[Any]:
        return [self.write(item, depth) for item in value]

    def _dict(self, value: Mapping[Any, Any], depth: int) -> Any:
        return {"dict": [[self.write(key, depth), self.write(item, depth)] for key, item in value.items()]}

    def _set(self, value: set[Any], depth: int) -> Any:
        return {"set": sorted((self.write(item, depth) for item in value), key=repr)}

    def _ranges(self, value: Any, depth: int) -> Any:
        return {"ranges": [expressions.write(bound, self._fakes.symbols) for bound in (value.lower, value.upper)]}

    def _rare(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensors.write(value)}
        if isinstance(value, sympy.Basic):
            return {"expression": expressions.write(value, self._fakes.symbols)}
        # Our conversion notes Python's own operators as the origins of nodes, too.
        if serializing.name_overload(value) is not None or isinstance(value, BuiltinFunctionType):
            return {"operator": self.target(value, called=False)}
        raise NotSerialisableError(f"a value of the type {type(value).__name__}: {str(value)[:200]}")


def _find(table: Mapping[str, Any], value: Any) -> str:
    for name, known in table.items():
        if known == value:
            return name
    raise NotSerialisableError(f"the value {value}")


class ValueReader:
    """Reads what `ValueWriter` wrote."""

    def __init__(self, tree: Mapping[str, Any], tensors: TensorReader, fakes: FakeReader) -> None:
        self.nodes: list[Node] = []  # of the current graph, that are made so far
        self._texts = tree["texts"]
        if not all(isinstance(text, str) for text in self._texts):
            raise ValueError("a text is not a str")
        self._operators = [targets.find_target(*fields) for fields in tree["operators"]]
        many = self._many
        self._readers: dict[str, Callable[[Any, int], Any]] = {
            "%": lambda content, depth: pick(self.nodes, content),
            "fake": lambda content, depth: fakes.read(content),
            "text": lambda content, depth: pick(self._texts, content),
            "tuple": lambda content, depth: tuple(many(content, depth)),
            "operator": lambda content, depth: pick(self._operators, content),
            "size": lambda content, depth: torch.Size(many(content, depth)),
            "dict": lambda content, depth: {self.read(k, depth): self.read(v, depth) for k, v in content},
            "set": lambda content, depth: set(many(content, depth)),
            "slice": lambda content, depth: slice(*_of_length(3, many(content, depth))),
            "float": lambda content, depth: float(_short(content)),
            "complex": lambda content, depth: complex(*(float(_short(part)) for part in _of_length(2, content))),
            "dtype": lambda content, depth: DTYPES[content],
            "device": lambda content, depth: _device(content),
            "layout": lambda content, depth: _LAYOUTS[content],
            "memory_format": lambda content, depth: _FORMATS[content],
            "metadata": lambda content, depth: serializing.TensorMetadata(*many(content, depth)),
            "ranges": lambda content, depth: serializing.ValueRanges(*map(fakes.expression, _of_length(2, content))),
            "tensor": lambda content, depth: tensors.read(content),
            "expression": lambda content, depth: fakes.expression(content),
            "number": lambda content, depth: fakes.read_number(content),
        }

    def read(self, tree: Any, depth: int = 0) -> Any:
        """Read a value; ValueError, LookupError or TypeError if it is not something that `ValueWriter` makes."""
        if type(tree) is list:
            return self._many(tree, depth + 1)
        if type(tree) is not dict:
            return tree
        ((kind, content),) = tree.items()
        return self._readers[kind](content, depth + 1)

    def target(self, number: Any) -> Any:
        """Return an operator."""
        return pick(self._operators, number)

    def _many(self, trees: Any, depth: int) -> list[Any]:
        if type(trees) is not list or depth > DEEPEST + 1:
            raise ValueError("a sequence of values is a list, and nests to a limited depth")
        return [self.read(tree, depth) for tree in trees]


def _of_length(length: int, items: Any) -> Any:
    if type(items) is not list or len(items) != length:
        raise ValueError(f"expected {length} values")
    return items


def _short(text: Any) -> str:
    if not isinstance(text, str) or len(text) > 40:
        raise ValueError("a number is a short text")
    return text


def _device(name: Any) -> torch.device:
    if not isinstance(name, str) or not _DEVICE.fullmatch(name):
        raise ValueError(f"the device {str(name)[:80]!r}")
    return torch.device(name)
