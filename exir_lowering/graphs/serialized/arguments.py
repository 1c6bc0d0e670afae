"""Arguments and metadata as JSON: plain values, and what only a compiler has: nodes, operators, fake tensors, sizes.

What a node calls is written by name: a registered operator, or a function of a closed table. Nothing is imported.

Kept exactly: values (`val`), stack traces, debug handles, tags, everything else that `ValueWriter` writes. As names:
classes in `nn_module_stack`, and what torch does not define in `source_fn_stack`. Histories (`from_node`) keep their
names, and number their graphs from 1; equal identifiers stay equal. Left out: `DROPPED`. Anything else makes a program
not serialisable.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Collection, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import sympy
import torch
from torch.fx import Node

from exir_lowering._upstream import serializing
from exir_lowering._upstream.serializing import NodeSource, make_source
from exir_lowering._upstream.tensors import SYMBOLS
from exir_lowering.graphs.operators.functions import FUNCTIONS, HIGHER_ORDER, REFUSED
from exir_lowering.graphs.serialized import fake_values, plain
from exir_lowering.graphs.serialized.fake_values import FakeReader, FakeWriter
from exir_lowering.graphs.serialized.plain import NotSerialisableError, PlainReader, PlainWriter, pick
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
            return {"expression": fake_values.write(value, self._fakes.symbols)}
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


DROPPED = frozenset({"desc"})
"""The keys of node.meta that are left out: descriptions by AOTAutograd, which nothing reads after export."""

_DEEPEST_HISTORY = 200


class MetadataWriter:
    """Writes the metadata of nodes."""

    def __init__(self, values: ValueWriter, leave_out: Collection[str]) -> None:
        self._values = values
        self._left_out = DROPPED | frozenset(leave_out)
        self._stacks: dict[Any, int] = {}  # of modules, each once
        self._sources: dict[Any, int] = {}  # the parts of histories, each once, and after its parents
        self._seen: dict[int, tuple[Any, int]] = {}  # by id, with the object, which stays alive
        self._graphs: dict[int, int] = {}
        self._writers: dict[str, Callable[[Any], Any]] = {
            "nn_module_stack": self._stack,
            "from_node": self._history,
            "source_fn_stack": self._functions,
        }

    def write(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Write the metadata of a node; NotSerialisableError if an entry cannot be written."""
        written = {}
        for key, value in meta.items():
            if key not in self._left_out:
                if type(key) is not str:
                    raise NotSerialisableError(f"the metadata has the key {key!r}")
                writer = self._writers.get(key, self._values.write)
                try:
                    written[key] = writer(value)
                except NotSerialisableError as error:
                    error.args = (f"{error} (in meta[{key!r}])",)
                    raise
        return written

    def finish(self) -> dict[str, Any]:
        """Return the tables."""
        return {"stacks": list(self._stacks), "sources": list(self._sources)}

    def _stack(self, stack: Any) -> Any:
        known = self._seen.get(id(stack))
        if known is None:
            if not isinstance(stack, dict):
                return self._values.write(stack)
            entries = tuple((key, path, _class_name(kind)) for key, (path, kind) in stack.items())
            if not all(isinstance(part, str) for entry in entries for part in entry):
                raise NotSerialisableError("a stack of modules has something else than names")
            known = self._seen[id(stack)] = (stack, self._stacks.setdefault(entries, len(self._stacks)))
        return {"stack": known[1]}

    def _history(self, sources: Any) -> Any:
        if not isinstance(sources, list):
            return self._values.write(sources)
        return {"history": [self._source(source, 0) for source in sources]}

    def _source(self, source: Any, depth: int) -> int:
        known = self._seen.get(id(source))
        if known is None:
            if type(source) is not NodeSource or depth > _DEEPEST_HISTORY:
                raise NotSerialisableError("a history of a node that torch did not write")
            parents = tuple(self._source(parent, depth + 1) for parent in source.from_node)
            info = source.node_info
            fields = (None, "", 0) if info is None else (info.name, info.target, self._graph(info.graph_id))
            entry = (*fields, source.pass_name, tuple(action.value for action in source.action), parents)
            known = self._seen[id(source)] = (source, self._sources.setdefault(entry, len(self._sources)))
        return known[1]

    def _graph(self, identifier: int) -> int:
        return self._graphs.setdefault(identifier, len(self._graphs) + 1)

    def _functions(self, stack: Any) -> Any:
        if not isinstance(stack, (list, tuple)) or not all(isinstance(one, tuple) and len(one) == 2 for one in stack):
            return self._values.write(stack)
        return {
            "functions": [
                [self._values.write(name), function if isinstance(function, str) else [self._function(function)]]
                for name, function in stack
            ]
        }

    def _function(self, function: Any) -> Any:
        try:
            return self._values.target(function)
        except NotSerialisableError:
            return name_source(function)


def _class_name(kind: Any) -> Any:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else kind


class MetadataReader:
    """Reads the metadata of nodes, which share equal stacks of modules and parts of histories, as in torch."""

    def __init__(self, tree: Mapping[str, Any], values: ValueReader) -> None:
        self._values = values
        self._stacks = [{_text(key): (_text(path), _text(kind)) for key, path, kind in one} for one in tree["stacks"]]
        self._sources: list[NodeSource] = []
        depths: list[int] = []
        for name, target, graph, pass_name, actions, parents in tree["sources"]:
            if type(graph) is not int:
                raise ValueError("the graph in a history is a number")
            found = [pick(self._sources, parent) for parent in parents]
            depths.append(1 + max((depths[parent] for parent in parents), default=0))
            if depths[-1] > _DEEPEST_HISTORY + 1:
                raise ValueError("a history nests too deep")
            named = None if name is None else _text(name)
            self._sources.append(make_source(named, _text(target), graph, _text(pass_name), actions, found))

    def read(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Read the metadata of a node."""
        read = self._values.read
        found = {}
        for key, tree in meta.items():
            if type(tree) is dict and key in ("nn_module_stack", "from_node", "source_fn_stack"):
                found[key] = self._special(tree)
            else:
                found[key] = read(tree)
        return found

    def _special(self, tree: Mapping[str, Any]) -> Any:
        ((kind, content),) = tree.items()
        if kind == "stack":
            return pick(self._stacks, content)
        if kind == "history":
            return [pick(self._sources, number) for number in content]
        if kind == "functions":
            return [(self._values.read(name), self._function(function)) for name, function in content]
        return self._values.read(tree)

    def _function(self, function: Any) -> Any:
        if isinstance(function, str):
            return function
        (named,) = function
        return find_source(named) if isinstance(named, str) else self._values.target(named)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a name is a text, got {str(value)[:80]!r}")
    return value
