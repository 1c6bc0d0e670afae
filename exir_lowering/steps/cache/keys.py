"""Keys: what identifies a partition."""

from __future__ import annotations

import enum
import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.fakes import FakeTensor, describe_symbols, symbols_of
from exir_lowering._upstream.operators import identify_operator
from exir_lowering._upstream.tensors import SYMBOLS, is_readable
from exir_lowering._upstream.value_keys import PLAIN, form_of
from exir_lowering.graphs.checksums import hash_storage
from exir_lowering.graphs.copies import list_tensors
from exir_lowering.model import Partition
from exir_lowering.plugins.backend import NAMES, CompileSpec

UNIMPORTANT = frozenset({"desc", "seq_nr"})
"""Keys of `node.meta` that nothing reads: AOTAutograd's descriptions, and a count of what was differentiated."""

_SHAPES = ("val", "tensor_meta")


class NoKeyError(Exception):
    """Something has no key, as it holds what cannot be compared by content; the message completes "not cached: "."""


def digest(value: Any) -> str:
    """Return the SHA-256 of what JSON can hold: 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


Storages = dict[int, tuple[torch.UntypedStorage, str]]
"""The digest of the memory of each storage by its address, with the storage, so that no other one gets the address."""


class Forms:
    """Writes values of one program in canonical form; unless `named`, names stand for the order of first occurrence."""

    def __init__(self, storages: Storages | None, *, named: bool) -> None:
        self.nodes: dict[Node, int] = {}
        self._storages, self._named = storages, named
        self._names: dict[str, int] = {}
        self._tensors: dict[int, int] = {}
        self._memories: dict[int, int] = {}
        self._graphs: dict[Any, int] = {}
        self.environments: dict[int, tuple[Any, dict[str, Any]]] = {}

    def name(self, text: str) -> str:
        """Return a name's form: which names are equal shows in any case."""
        return repr(text) if self._named else f"#{self._names.setdefault(text, len(self._names))}"

    def form(self, value: Any) -> str:
        """Return a value's form; raise NoKeyError if it has none."""
        kind = type(value)
        if kind is float:
            return "nan" if value != value else value.hex()
        if kind in (type(None), bool, int, str, bytes, complex):
            return repr(value)
        if isinstance(value, Node):
            if value not in self.nodes:
                raise NoKeyError(f"the node {value.name!r} is not an earlier one of the program")
            return f"%{self.nodes[value]}"
        if isinstance(value, (list, tuple)):
            mark = "L" if isinstance(value, list) else "T" if kind is tuple else _class_form(kind)
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
        if isinstance(value, sympy.Basic):
            return f"{kind.__name__}:{value}"
        if isinstance(value, slice):
            return f"slice({self.form((value.start, value.stop, value.step))})"
        if isinstance(value, enum.Enum):
            return f"{_class_form(kind)}.{value.name}"
        if isinstance(value, type):
            return _class_form(value)
        if is_dataclass(value):
            return f"{_class_form(kind)}{self.form([getattr(value, field.name) for field in fields(value)])}"
        operator = identify_operator(value)
        if operator is None:
            raise NoKeyError(f"a value of type {kind.__module__}.{kind.__qualname__} has no canonical form")
        return f"op:{operator}"

    def tensor(self, value: torch.Tensor) -> str:
        """Return the form of a tensor: of a fake one what is known; of another one its memory, and who shares it."""
        if value.layout is not torch.strided:
            raise NoKeyError(f"a tensor has the layout {value.layout}")
        facts = form_of(value, lambda size: str(size) if type(size) is int else self._symbolic(size))
        text = f"{(*facts, isinstance(value, torch.nn.Parameter))}"
        if type(value) is FakeTensor:
            return f"fake:{text}" if value.constant is None else f"fake:{text}={self.tensor(value.constant)}"
        if not is_readable(value) or value.is_quantized:
            raise NoKeyError(f"the memory of a {type(value).__name__} on {value.device} cannot be read")
        storage, known = value.untyped_storage(), self._storages
        address, same = storage.data_ptr(), self._tensors.setdefault(id(value), len(self._tensors))
        if known is not None and (address not in known or known[address][0].nbytes() != storage.nbytes()):
            known[address] = storage, hash_storage(storage)  # all of it: backends read beyond a view's elements
        memory = self._memories.setdefault(address, len(self._memories))
        return f"tensor:{text}={same}@{memory}:{'' if known is None else known[address][1]}"

    def _symbolic(self, value: Any) -> str:
        """Return the form of a symbolic number, and remember its symbols."""
        environment = value.node.shape_env
        if environment is not None:
            self.environments.setdefault(id(environment), (environment, {}))[1].update(symbols_of(value))
        return str(value.node.expr)

    def metadata(self, key: str, value: Any) -> str:
        """Return the form of an entry of `node.meta`, with what torch writes of code and of histories."""
        try:
            if key == "nn_module_stack":  # where names may be ids
                value = [(self.name(name), path, _code_name(kind)) for name, (path, kind) in value.items()]
            if key == "source_fn_stack":
                value = [(name, _code_name(function)) for name, function in value]
            return self.form(self._history(value) if key == "from_node" else value)
        except NoKeyError as error:
            raise NoKeyError(f"node.meta[{key!r}]: {error}") from None
        except (TypeError, ValueError, AttributeError) as error:  # not what torch puts there
            raise NoKeyError(f"node.meta[{key!r}] is not what torch writes: {error}") from None

    def _history(self, sources: Any) -> list[Any]:
        """Return what torch's `NodeSource`s hold; their graphs are numbered, as ids differ between processes."""
        return [
            (
                *(one.name, str(one.target), one.pass_name, [str(action) for action in one.action]),
                self._graphs.setdefault(one.graph_id, len(self._graphs)),
                self._history(one.from_node),
            )
            for one in sources or ()
        ]


def _code_name(value: Any) -> Any:
    """Return the name of a class or function, as torch.export writes it too."""
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else value


def _class_form(kind: type) -> str:
    return f"class:{[f'{base.__module__}.{base.__qualname__}' for base in kind.__mro__]!r}"


def describe_partition(
    partition: Partition, storages: Storages | None, unread: Collection[str] = ()
) -> dict[str, list[str]]:
    """Return the lines of each part of a partition's key, without the content of tensors if there are no `storages`."""
    program = partition.program
    named, left_out = NAMES not in unread, {*unread, *UNIMPORTANT, *_SHAPES}
    forms = Forms(storages, named=named)
    modules: dict[int, int] = {}
    lines = defaultdict[str, list[str]](list)

    def weight(value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            raise NoKeyError(f"a weight or constant is a {type(value).__name__}")
        lines["weights"].append(forms.tensor(value))
        return f"weight {len(lines['weights']) - 1}"

    def metadata(owner: str, meta: Mapping[str, Any]) -> list[str]:
        read = sorted(((str(key), meta[key]) for key in meta if key not in left_out), key=itemgetter(0))
        return [f"{owner} {key} {forms.metadata(key, value)}" for key, value in read]

    def graph(module: GraphModule) -> str:
        """Write a graph and those nested in it, each once."""
        if id(module) in modules:
            return f"graph {modules[id(module)]}"
        number = modules[id(module)] = len(modules)
        lines["metadata"] += metadata(f"graph {number}", module.meta)
        for node in module.graph.nodes:
            forms.nodes[node] = len(forms.nodes)
            target = ""
            if node.op == "call_function":
                target = forms.form(node.target)
            elif node.op == "get_attr":
                value = graphs.attribute(module, str(node.target))
                target = graph(value) if isinstance(value, GraphModule) else weight(value)
            elif node.op not in ("placeholder", "output"):
                raise NoKeyError(f"the graph has a node of kind {node.op}")
            lines["graph"].append(f"{node.op} {target} {forms.form(node.args)} {forms.form(node.kwargs)}")
            lines["shapes"] += [f"{key} {forms.metadata(key, node.meta[key])}" for key in _SHAPES if key in node.meta]
            lines["shapes"].append("")
            lines["metadata"] += metadata(str(forms.nodes[node]), node.meta)
            if named:
                lines["names"].append(f"{node.name} {node.target if node.op != 'call_function' else ''}")
        lines["graph"].append(f"end of graph {number}")
        return f"graph {number}"

    # The weights in the order of their placeholders, then those that the signature does not name.
    signature = program.graph_signature
    targets = [str(spec.target) for spec in signature.input_specs if spec.target is not None]
    found = {target: graphs.lifted_value(program, target) for target in targets}
    rest = {**program.state_dict, **program.constants}
    found |= {name: rest[name] for name in sorted(rest) if name not in found}
    for name, value in found.items():
        weight(value)
        lines["signature"].append(f"weight {forms.name(name)} {name in program.state_dict:d}")
    pairs = pairwise(sorted(name.replace(".", "_").split("_") for name in found))
    if named or any(second[: len(first)] == first for first, second in pairs):
        lines["names"] += found  # a backend could make one name of two: "conv_weight_fused" of "conv.weight"
    graph(program.graph_module)
    for spec in (*signature.input_specs, *signature.output_specs):
        target = "" if spec.target is None else forms.name(str(spec.target))
        more = f"{getattr(spec, 'persistent', '')} {forms.form(getattr(spec.arg, 'value', None))}"
        lines["signature"].append(f"{spec.kind} {type(spec.arg).__qualname__} {target} {more}")
    for entry in program.module_call_graph:
        called = entry.signature
        shown = "" if called is None else f"{called.in_spec} {called.out_spec} {called.forward_arg_names}"
        lines["signature"].append(f"call {forms.name(entry.fqn)} {shown}")
    # Metadata may refer to an environment of which that of the values is a copy: lines may be equal.
    lines["shapes"] += dict.fromkeys(line for known in forms.environments.values() for line in describe_symbols(*known))
    lines["shapes"] += sorted(f"{symbol} in {bounds}" for symbol, bounds in program.range_constraints.items())
    for option in partition.compile_specs:
        if type(option) is not CompileSpec or not isinstance(option.value, (bytes, bytearray)):
            raise NoKeyError(f"the compile spec {option.key!r} has a value of type {type(option.value).__name__}")
        lines["specs"].append(f"{option.key!r} {bytes(option.value)!r}")
    return lines


def describe_neighbours(programs: Iterable[ExportedProgram]) -> dict[int, list[str]]:
    """Return what programs read of each storage, by address: `WeightStore` keeps overlapping weights as one piece."""
    found: dict[int, set[str]] = {}
    for tensor in list_tensors(programs):
        if tensor.layout is torch.strided and tensor.device.type == "cpu":
            facts = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()}"
            found.setdefault(tensor.untyped_storage().data_ptr(), set()).add(facts)
    return {address: sorted(facts) for address, facts in found.items()}
