"""Arguments and metadata as JSON: plain values, and what only a compiler has: nodes, operators, fake tensors, sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType
from typing import Any

import sympy
import torch
from torch.fx import Node

from exir_lowering._upstream import serializing
from exir_lowering.graphs.serialized import expressions, plain, targets
from exir_lowering.graphs.serialized.container import NotSerialisableError, pick
from exir_lowering.graphs.serialized.fake_values import FakeReader, FakeWriter
from exir_lowering.graphs.serialized.plain import PlainReader, PlainWriter
from exir_lowering.graphs.serialized.tensors import DTYPES, TensorReader, TensorWriter, name_dtype

_LONG = 32
"""From which length on a text is written once, and referred to."""

_LAYOUTS = {"strided": torch.strided, "sparse_coo": torch.sparse_coo, "sparse_csr": torch.sparse_csr}
_DEVICE = re.compile(r"[a-z]{1,12}(:[0-9]{1,3})?", re.ASCII)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


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
            serializing.ValueRanges: self._ranges,
            **dict.fromkeys(_SYMBOLIC, lambda value, depth: self._fakes.write_number(value)),
        }
        self.writers |= own

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

    def _ranges(self, value: Any, depth: int) -> Any:
        return {"ranges": [expressions.write(bound, self._fakes.symbols) for bound in (value.lower, value.upper)]}


class ValueReader(PlainReader):
    """Reads what `ValueWriter` wrote."""

    dtypes, layouts, devices = DTYPES, _LAYOUTS, _DEVICE

    def __init__(self, tree: Mapping[str, Any], tensors: TensorReader, fakes: FakeReader) -> None:
        super().__init__()
        self.nodes: list[Node] = []  # of the current graph, that are made so far
        self._texts = tree["texts"]
        if not all(isinstance(text, str) for text in self._texts):
            raise ValueError("a text is not a str")
        self._operators = [targets.find_target(*fields) for fields in tree["operators"]]
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
