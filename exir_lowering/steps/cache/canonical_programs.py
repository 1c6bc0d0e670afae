"""A partition in canonical form: everything that a backend can read of it, in the parts of its key.

Nodes and weights are written by their positions. Names, and where the model's operators come from, are parts of their
own, which are left out for a backend that declares not to read them (`unread`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering.graphs import debug_handles
from exir_lowering.plugins.reads import NAMES
from exir_lowering.steps.cache.canonical_values import Forms, Storages
from exir_lowering.steps.cache.keys import NoKeyError

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
