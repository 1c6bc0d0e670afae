"""Keys: what identifies a result, in named parts, so that a miss can say which of them differ."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.fakes import FakeTensor, constant_of, describe_symbols, symbols_of
from exir_lowering._upstream.operators import identify_operator
from exir_lowering._upstream.tensors import SYMBOLS, is_readable
from exir_lowering._upstream.value_keys import PLAIN, form_of
from exir_lowering.graphs import debug_handles
from exir_lowering.graphs.checksums import hash_storage
from exir_lowering.plugins.reads import NAMES

FORMAT = 1  # the version of the keys and of the entries; a change of either makes all earlier entries misses


class NoKeyError(Exception):
    """Something has no key, as it holds what cannot be compared by content; the message completes "not cached: "."""


@dataclass(frozen=True, slots=True)
class Key:
    """What identifies a result."""

    kind: str  # of the result: "preprocess" or "edge"
    parts: Mapping[str, str]  # the digest of each part, by name

    @property
    def digest(self) -> str:
        """The digest of all parts: 64 hexadecimal digits."""
        return _digest(json.dumps([FORMAT, self.kind, dict(self.parts)], sort_keys=True))

    def differs(self, other: Mapping[str, str]) -> tuple[str, ...]:
        """Return the names of the parts in which another key differs."""
        names = dict.fromkeys((*self.parts, *other))
        return tuple(name for name in names if self.parts.get(name) != other.get(name))


def make_key(kind: str, parts: Mapping[str, Iterable[str]]) -> Key:
    """Make a key of some kind of result from the lines of each part, by name. Lines may hold anything."""
    digests = {name: _digest(json.dumps(list(lines))) for name, lines in parts.items()}
    return Key(kind, MappingProxyType(digests))


def join_keys(keys: Sequence[Key], names: Sequence[str]) -> Key:
    """Make the key of a group from those of its members, of one kind, in their order; names are part of it."""
    parts = {part: [key.parts[part] for key in keys] for part in keys[0].parts}
    return make_key(keys[0].kind, {**parts, "group": names})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Storages:
    """The digests of the memory of tensors, each storage once."""

    def __init__(self) -> None:
        self._digests: dict[int, tuple[Any, str]] = {}  # with the storage, so that its address is not reused

    def hash(self, tensor: torch.Tensor) -> str:
        """Return the digest of a tensor's whole storage: backends read beyond a view's elements."""
        storage = tensor.untyped_storage()
        found = self._digests.get(storage.data_ptr())
        if found is None or found[0].nbytes() != storage.nbytes():
            found = storage, hash_storage(storage)
            self._digests[storage.data_ptr()] = found
        return found[1]


class Forms:
    """Writes values of one program in canonical form; unless `named`, names stand for the order of first occurrence."""

    def __init__(self, storages: Storages, *, named: bool) -> None:
        self.nodes: dict[Node, int] = {}
        self._storages, self._named = storages, named
        self._names: dict[str, int] = {}
        self._tensors: dict[int, int] = {}
        self._memories: dict[int, int] = {}
        self._classes: dict[type, str] = {}
        self._sources: dict[int, tuple[Any, str]] = {}
        self._graphs: dict[Any, int] = {}
        self._special: dict[str, Callable[[Any], str]] = {
            "nn_module_stack": self._modules,
            "source_fn_stack": lambda stack: ";".join(map(self._function, stack)),
            "torch_fn": self._function,
            "from_node": self._history,
        }
        self._environments: dict[int, tuple[Any, dict[str, Any]]] = {}

    def name(self, text: str) -> str:
        """Return a name's form: which names are equal shows in any case."""
        return repr(text) if self._named else f"#{self._names.setdefault(text, len(self._names))}"

    def form(self, value: Any) -> str:
        """Return a value's form; raise NoKeyError if it has none."""
        kind = type(value)
        simple = _SIMPLE.get(kind)
        if simple is not None:
            return simple(value)
        if isinstance(value, Node):
            if value not in self.nodes:
                raise NoKeyError(f"the node {value.name!r} is not an earlier one of the program")
            return f"%{self.nodes[value]}"
        if isinstance(value, (list, tuple)):
            mark = "L" if isinstance(value, list) else "T" if kind is tuple else self._class(kind)
            return f"{mark}({','.join(map(self.form, value))})"
        if isinstance(value, Mapping):
            return f"D({','.join(f'{self.form(key)}:{self.form(content)}' for key, content in value.items())})"
        if isinstance(value, (set, frozenset)):
            return f"S({','.join(sorted(map(self.form, value)))})"
        if isinstance(value, PLAIN):
            return str(value)
        if isinstance(value, SYMBOLS):
            return f"{kind.__name__}:{self._symbolic(value)}"
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        return self._rare(value)

    def _rare(self, value: Any) -> str:
        if isinstance(value, slice):
            return f"slice({self.form(value.start)},{self.form(value.stop)},{self.form(value.step)})"
        if isinstance(value, enum.Enum):
            return f"{self._class(type(value))}.{value.name}"
        if isinstance(value, type):
            return self._class(value)
        if is_dataclass(value):
            content = ",".join(self.form(getattr(value, field.name)) for field in fields(value))
            return f"{self._class(type(value))}({content})"
        operator = identify_operator(value)
        if operator is not None:
            return f"op:{operator}"
        raise NoKeyError(f"a value of type {type(value).__module__}.{type(value).__qualname__} has no canonical form")

    def _class(self, kind: type) -> str:
        """Return the form of a class: its name and those of its bases."""
        if kind not in self._classes:
            names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
            self._classes[kind] = f"class:{names!r}"
        return self._classes[kind]

    def tensor(self, value: torch.Tensor) -> str:
        """Return the form of a tensor; a fake one's describes it, another one's has its content too."""
        if value.layout is not torch.strided:
            raise NoKeyError(f"a tensor has the layout {value.layout}")
        facts = (*form_of(value, self._number), isinstance(value, torch.nn.Parameter))
        if type(value) is FakeTensor:
            constant = constant_of(value)
            return f"fake:{facts}" if constant is None else f"fake:{facts}={self.tensor(constant)}"
        return f"tensor:{facts}={self._content(value)}"

    def _content(self, tensor: torch.Tensor) -> str:
        """Return the form of a tensor's memory, and which tensors of the program are the same or share memory."""
        if not is_readable(tensor) or tensor.is_quantized:
            raise NoKeyError(f"the memory of a {type(tensor).__name__} on {tensor.device} cannot be read")
        same = self._tensors.setdefault(id(tensor), len(self._tensors))
        memory = self._memories.setdefault(tensor.untyped_storage().data_ptr(), len(self._memories))
        return f"{same}@{memory}:{self._storages.hash(tensor)}"

    def _number(self, value: Any) -> str:
        return str(value) if type(value) is int else self._symbolic(value)

    def _symbolic(self, value: Any) -> str:
        """Return the form of a symbolic number, and remember its symbols."""
        environment = value.node.shape_env
        if environment is not None:
            self._environments.setdefault(id(environment), (environment, {}))[1].update(symbols_of(value))
        return str(value.node.expr)

    def symbols(self) -> list[str]:
        """Return what is known about the symbols of the values that were written so far."""
        found = self._environments.values()
        return [line for environment, symbols in found for line in describe_symbols(environment, symbols)]

    def metadata(self, key: str, value: Any) -> str:
        """Return the form of an entry of `node.meta`, where names are known as such; NoKeyError if it has none."""
        special = self._special.get(key)
        try:
            return special(value) if special is not None else self.form(value)
        except NoKeyError as error:
            raise NoKeyError(f"node.meta[{key!r}]: {error}") from None
        except (TypeError, ValueError, AttributeError) as error:  # not what torch puts there
            raise NoKeyError(f"node.meta[{key!r}] is not what torch writes: {error}") from None

    def _modules(self, stack: Mapping[str, Any]) -> str:
        return ";".join(
            f"{self.name(key)},{self.name(path)},{self._named_class(kind)}" for key, (path, kind) in stack.items()
        )

    def _named_class(self, kind: Any) -> str:
        """Return the form of a class in metadata by its name alone, as torch.export writes it."""
        return self.form(f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else kind)

    def _function(self, pair: Any) -> str:
        name, function = pair
        return f"{self.name(name)},{self._named_class(function)}"

    def _history(self, sources: Any) -> str:
        """Return the form of torch's `NodeSource`s; their graphs are numbered, as ids differ between processes."""
        texts = []
        for source in sources or ():
            if id(source) not in self._sources:
                passes = f"{source.pass_name!r},{[str(action) for action in source.action]!r}"
                text = f"{self.name(source.name)},{self.name(str(source.target))},{passes}"
                graph = self._graphs.setdefault(source.graph_id, len(self._graphs))
                self._sources[id(source)] = source, f"({text},{graph},{self._history(source.from_node)})"
            texts.append(self._sources[id(source)][1])
        return ";".join(texts)


_SIMPLE: Mapping[type, Callable[[Any], str]] = {
    type(None): repr,
    bool: repr,
    int: repr,
    float: lambda value: "nan" if value != value else value.hex(),
    complex: lambda value: f"{value.real.hex()}+{value.imag.hex()}j",
    str: repr,
    bytes: repr,
}


_SHAPES = ("val", "tensor_meta")

UNIMPORTANT = frozenset({"desc", "seq_nr"})
"""Keys of `node.meta` that Edge programs from the cache lack: descriptions by AOTAutograd, which nothing reads after
export, and a count of what the process has differentiated so far."""


def describe_program(
    program: ExportedProgram, storages: Storages, unread: Collection[str], handles: Mapping[int, int] | None
) -> dict[str, list[str]]:
    """Return the lines of each part of a partition's key; `handles` replaces debug handles, None keeps them."""
    writer = _Writer(Forms(storages, named=NAMES not in unread), unread, handles)
    writer.write_state(program)
    writer.write_graph(program.graph_module)
    writer.write_signature(program)
    return writer.finish(program)


class _Writer:
    def __init__(self, forms: Forms, unread: Collection[str], handles: Mapping[int, int] | None) -> None:
        self._forms, self._unread, self._handles = forms, unread, handles
        self._named = NAMES not in unread
        self._modules: dict[int, int] = {}
        self._weights: list[str] = []
        self._lines: dict[str, list[str]] = {
            part: [] for part in ("graph", "shapes", "signature", "handles", "metadata", "names")
        }

    def write_state(self, program: ExportedProgram) -> None:
        """Write the weights, in the order of their placeholders, then those that the signature does not name."""
        found: dict[str, Any] = {}
        for spec in program.graph_signature.input_specs:
            if spec.target is not None:
                found[str(spec.target)] = graphs.lifted_value(program, spec.target)
        rest = {**program.state_dict, **program.constants}
        found |= {name: rest[name] for name in sorted(rest) if name not in found}
        for name, value in found.items():
            self._weight(value)
            self._lines["signature"].append(f"weight {self._forms.name(name)} {name in program.state_dict:d}")
        self._lines["names"] += list(found) if self._named else _confusable(found)

    def _weight(self, value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            raise NoKeyError(f"a weight or constant is a {type(value).__name__}")
        self._weights.append(self._forms.tensor(value))
        return f"weight {len(self._weights) - 1}"

    def write_graph(self, module: GraphModule) -> str:
        """Write a graph and those nested in it, each once."""
        if id(module) in self._modules:
            return f"graph {self._modules[id(module)]}"
        number = self._modules[id(module)] = len(self._modules)
        self._lines["metadata"] += self._metadata(f"graph {number}", module.meta)
        for node in module.graph.nodes:
            self._forms.nodes[node] = len(self._forms.nodes)
            self._node(module, node)
        self._lines["graph"].append(f"end of graph {number}")
        return f"graph {number}"

    def _node(self, module: GraphModule, node: Node) -> None:
        forms, lines = self._forms, self._lines
        if node.op == "call_function":
            target = forms.form(node.target)
        elif node.op == "get_attr":
            value = graphs.attribute(module, str(node.target))
            target = self.write_graph(value) if isinstance(value, GraphModule) else self._weight(value)
        elif node.op in ("placeholder", "output"):
            target = ""
        else:
            raise NoKeyError(f"the graph has a node of kind {node.op}")
        lines["graph"].append(f"{node.op} {target} {forms.form(node.args)} {forms.form(node.kwargs)}")
        lines["shapes"] += [f"{key} {forms.metadata(key, node.meta[key])}" for key in _SHAPES if key in node.meta]
        lines["shapes"].append("")
        lines["metadata"] += self._metadata(str(forms.nodes[node]), node.meta)
        if debug_handles.KEY in node.meta:
            handle = node.meta[debug_handles.KEY]
            shown = handle if self._handles is None else self._handles.get(handle, handle)
            lines["handles"].append(f"{forms.nodes[node]} {forms.form(shown)}")
        if self._named:
            lines["names"].append(f"{node.name} {node.target if node.op != 'call_function' else ''}")

    def _metadata(self, owner: str, meta: Mapping[str, Any]) -> list[str]:
        left_out = {*self._unread, *UNIMPORTANT, *_SHAPES, debug_handles.KEY}
        read = sorted(((str(key), meta[key]) for key in meta if key not in left_out), key=itemgetter(0))
        return [f"{owner} {key} {self._forms.metadata(key, value)}" for key, value in read]

    def write_signature(self, program: ExportedProgram) -> None:
        """Write the signature: what the inputs are, and where the outputs go."""
        signature, name = program.graph_signature, self._forms.name
        for spec in signature.input_specs:
            target = "" if spec.target is None else name(str(spec.target))
            line = f"in {spec.kind} {type(spec.arg).__qualname__} {target} {spec.persistent}"
            value = getattr(spec.arg, "value", None)
            self._lines["signature"].append(f"{line} {self._forms.form(value)}")
        for spec in signature.output_specs:
            target = "" if spec.target is None else name(str(spec.target))
            value = getattr(spec.arg, "value", None)
            line = f"out {spec.kind} {type(spec.arg).__qualname__} {target} {self._forms.form(value)}"
            self._lines["signature"].append(line)
        for entry in program.module_call_graph:
            called = entry.signature
            shown = "" if called is None else f"{called.in_spec} {called.out_spec} {called.forward_arg_names}"
            self._lines["signature"].append(f"call {self._forms.name(entry.fqn)} {shown}")

    def finish(self, program: ExportedProgram) -> dict[str, list[str]]:
        """Return the lines of all parts."""
        ranges = sorted(f"{symbol} in {found}" for symbol, found in program.range_constraints.items())
        self._lines["shapes"] += [*self._forms.symbols(), *ranges]
        return {**self._lines, "weights": self._weights}


def _confusable(names: Iterable[str]) -> list[str]:
    """Return the names if a backend could make one name of two ("conv_weight_fused" of "conv.weight"), else none."""
    found = list(names)
    parts = sorted(name.replace(".", "_").split("_") for name in found)
    return found if any(second[: len(first)] == first for first, second in pairwise(parts)) else []


def describe_neighbours(programs: Sequence[ExportedProgram]) -> dict[int, list[str]]:
    """Return what partitions read of each storage, by address: `WeightStore` keeps overlapping weights as one piece."""
    found: dict[int, set[str]] = {}
    for program in programs:
        for tensor in (*program.state_dict.values(), *program.constants.values()):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                facts = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()}"
                found.setdefault(tensor.untyped_storage().data_ptr(), set()).add(facts)
    return {address: sorted(facts) for address, facts in found.items()}


def list_neighbours(program: ExportedProgram, neighbours: Mapping[int, list[str]]) -> list[str]:
    """Return the lines about the storages that a program reads."""
    tensors = (*program.state_dict.values(), *program.constants.values())
    addresses = [value.untyped_storage().data_ptr() for value in tensors if isinstance(value, torch.Tensor)]
    return [line for address in dict.fromkeys(addresses) for line in (*neighbours.get(address, ()), "")]
