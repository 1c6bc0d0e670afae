"""Whether two Edge programs are the same to all that later steps read.

Each program is written as lines, by place: nodes in order, by their position, as their names may differ.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from executorch.exir.debug_handle_utils import get_greatest_ancestor_node_identifier
from torch.export import ExportedProgram
from torch.export.graph_signature import InputSpec, OutputSpec
from torch.fx import Graph, GraphModule, Node

from exir_lowering._upstream.tensors import SYMBOLS
from exir_lowering.graphs import attribute, origins

MISSING = "missing"

READ = (
    *("val", "tensor_meta", "stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node"),
    *("debug_handle", "quantization_tag", "partitioner_tag"),
)
"""The metadata of operators that partitioners, backends, the emitter and reports read."""

_ASSERT = torch.ops.aten._assert_scalar.default
_UNBACKED = re.compile(r"\b(?:u|zuf)\d+\b")
_CHANGING = re.compile(r"(?<=<eval_with_key>)\.\d+|(?<= at )0x[0-9a-f]+|(?<= on node )'\w+'$|\bu\d+\b(?=.* on node )")

Lines = dict[str, tuple[str, str]]  # by what it is, the type and the text of each fact about something


def list_differences(ours: ExportedProgram, theirs: ExportedProgram, *, limit: int = 100) -> list[str]:
    """Return what differs, readable, at most so many: "node 17 mul: val stride (1, 4) / (4, 1)", ours first."""
    return list(itertools.islice(_compare(_Writer(ours), _Writer(theirs)), limit))


def _compare(ours: _Writer, theirs: _Writer) -> Iterator[str]:
    mine, other = ours.write(), theirs.write()
    for place in {**other, **mine}:
        # A node that only one of them has shows in the number of nodes.
        if place in mine and place in other:
            yield from _differ(theirs.names.get(place, place), mine[place], other[place])
    for what in ("state_dict", "constants"):
        tables = [getattr(side.program, what) for side in (ours, theirs)]
        for key in tables[0]:
            if key in tables[1] and tables[0][key] is not tables[1][key]:
                yield from _differ(
                    f"{what}:",
                    *(side.value(key, table[key]) for side, table in zip((ours, theirs), tables, strict=True)),
                )


def _differ(place: str, ours: Lines, theirs: Lines) -> Iterator[str]:
    for what in {**theirs, **ours}:
        a, b = ours.get(what), theirs.get(what)
        if a is None or b is None:
            # Of what only one of them has, its parts are not shown.
            if what in READ:
                yield f"{place} {what} {'present' if a else MISSING} / {'present' if b else MISSING}"
        elif a != b:
            shown = (f"{kind} {text}" if a[0] != b[0] else text for kind, text in (a, b))
            yield f"{place} {what} {' / '.join(map(_short, shown))}".lstrip()


class _Writer:
    """Writes one program, with names for what each conversion renumbers."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.names: dict[str, str] = {}  # of the places, for messages
        self._places: dict[str, Lines] = {}
        self._unbacked: dict[str, str] = {}
        self._positions: dict[Node, int] = {}
        self._firsts: dict[tuple[str, Any], int] = {}

    def write(self) -> dict[str, Lines]:
        """Return the lines about the graphs and what is around them."""
        program = self.program
        self._graph("", program.graph_module)
        nodes = {node.name: self._positions[node] for node in program.graph.nodes}
        # torch keeps the ranges of unbacked symbols of earlier steps.
        kept = program.range_constraints.items()
        ranges = {self._symbolic(one): self._symbolic(found) for one, found in kept if self._is_used(one)}
        around: dict[str, Any] = {
            "sharing of tensors": _shared(program),
            "range_constraints": dict(sorted(ranges.items())),
            "example_inputs": program.example_inputs,
            "module_call_graph": [_module_call(entry) for entry in program.module_call_graph],
            "dialect": program.dialect,
            "verifiers": [_verifier(kind) for kind in program.verifiers],
        }
        signature = program.graph_signature
        for what in ("input_specs", "output_specs"):
            around[f"signature: {what}"] = [self._spec(spec, nodes) for spec in getattr(signature, what)]
        for what in ("state_dict", "constants"):
            around[f"{what}: keys"] = list(getattr(program, what))
        self._places[""] = {k: v for what, value in around.items() for k, v in self.value(what, value).items()}
        return self._places

    def _graph(self, path: str, module: GraphModule) -> None:
        nodes = list(module.graph.nodes)
        self._positions.update((node, index) for index, node in enumerate(nodes))
        for index, node in enumerate(nodes):
            place = f"{path}node {index}"
            self.names[place] = f"{place} {node.name}:"
            found = attribute(module, str(node.target)) if node.op == "get_attr" else None
            self._places[place] = self._node(node, len(self._places), found)
            if isinstance(found, GraphModule):
                self._graph(f"{path}{node.target}/", found)
        self._places[path or "graph:"] = {
            "number of nodes": ("int", str(len(nodes))),
            "calling convention": ("list", str(_calling_convention(module.graph))),
            **self.value("meta", dict(module.meta)),
        }

    def _node(self, node: Node, number: int, found: Any) -> Lines:
        facts: dict[str, Any] = {"op": node.op, "args": node.args, "kwargs": dict(node.kwargs), "custom": _custom(node)}
        facts["users"] = [self._positions.get(user) for user in node.users]
        if node.op == "call_function":  # each conversion makes Edge operators: those of one name and schema are equal
            facts["target"] = [type(node.target).__name__, str(node.target)]
        elif node.op == "get_attr" and not isinstance(found, GraphModule):
            facts["attribute"] = found
        facts |= {key: node.meta[key] for key in READ if key in node.meta and _is_read(node, key)}
        value, history = facts.get("val"), facts.get("from_node")
        if history is not None:
            facts["from_node"] = None
            # torch makes new nodes of sizes, and of what it asserts of them, in each step.
            if not isinstance(value, SYMBOLS) and node.target is not _ASSERT:
                facts |= {"name of the ancestor": _ancestor(node)[0], "decomposed from": str(origins(node))}
            facts["same ancestor as node"] = self._first("ancestor", _ancestor(node), number)
        if value is not None:
            kept = id(value) if isinstance(value, torch.Tensor) else node
            facts["same val object as node"] = self._first("val", kept, number)
            facts["same fake mode as node"] = self._first("mode", id(getattr(value, "fake_mode", None)), number)
        return {k: v for what, fact in facts.items() for k, v in self.value(what, fact).items()}

    def _first(self, kind: str, group: Any, number: int) -> int:
        """Return the number of the first node of a group."""
        return self._firsts.setdefault((kind, group), number)

    # -- values

    def value(self, what: str, value: Any) -> Lines:
        """Return the lines about a value of metadata or arguments, and about its parts."""
        return dict(self._parts(what, value))

    def _parts(self, what: str, value: Any) -> Iterator[tuple[str, tuple[str, str]]]:
        kind = type(value).__name__
        if isinstance(value, Node):
            yield what, (kind, f"node {self._positions[value]}")
        elif isinstance(value, torch.Tensor):
            yield what, (kind, "tensor")
            for fact in ("shape", "stride", "storage_offset", "dtype", "device", "layout", "requires_grad"):
                found = getattr(value, fact)
                yield f"{what} {fact}", ("", self._symbolic(found() if callable(found) else found))
            if hasattr(value, "fake_mode"):
                yield from self._parts(f"{what} constant", getattr(value, "constant", None))
            else:
                yield f"{what} values", ("", _content(value))
        elif isinstance(value, SYMBOLS):
            yield what, (kind, self._symbolic(value))
        elif isinstance(value, (list, tuple)):
            yield what, (kind, f"of {len(value)}")
            for index, one in enumerate(value):
                yield from self._parts(f"{what}[{index}]", one)
        elif isinstance(value, Mapping):
            yield what, (kind, f"keys {_text(list(value))}")
            for key, one in value.items():
                yield from self._parts(f"{what}[{key!r}]", one)
        elif isinstance(value, slice):
            yield from self._parts(what, ("slice", value.start, value.stop, value.step))
        else:
            yield what, (kind, _text(sorted(value, key=str) if isinstance(value, (set, frozenset)) else value))

    def _is_used(self, symbol: object) -> bool:
        return not _UNBACKED.fullmatch(str(symbol)) or str(symbol) in self._unbacked

    def _symbolic(self, value: object) -> str:
        """Return the text of expressions, with unbacked symbols by the order of their occurrence."""
        return _UNBACKED.sub(lambda m: self._unbacked.setdefault(m[0], f"unbacked{len(self._unbacked)}"), str(value))

    def _spec(self, spec: InputSpec | OutputSpec, nodes: Mapping[str, int]) -> dict[str, Any]:
        """Describe an entry of the signature, its node by position."""
        name = getattr(spec.arg, "name", None)
        return {
            "kind": spec.kind.name,
            "target": spec.target,
            "persistent": getattr(spec, "persistent", None),
            "argument": type(spec.arg).__name__,
            "value": _text(getattr(spec.arg, "value", None)),
            # Inputs of a constant value have a placeholder, outputs do not have a node.
            "node": nodes.get(name, MISSING) if name is not None else None,
        }


def _calling_convention(graph: Graph) -> list[str]:
    """Describe how a graph takes its arguments and returns its results."""
    info = getattr(graph._codegen, "pytree_info", None)
    return [type(graph._codegen).__name__, *(str(part) for part in info or ())]


def _text(value: object) -> str:
    """Return a value's text without addresses and numbers of files."""
    return _CHANGING.sub("", str(value))


def _short(text: str) -> str:
    return text if len(text) < 300 else f"{text[:300]}..."


def _ancestor(node: Node) -> tuple[str, str]:
    """Return the name and the graph of the node that this one was made from."""
    if not node.meta["from_node"]:
        return "", ""
    name, _, graph = get_greatest_ancestor_node_identifier(node).rpartition(".")
    return name, graph


def _custom(node: Node) -> dict[str, Any]:
    """Return what users and tools noted on a node, without what torch.compile notes about torch's own code."""
    noted = node.meta.get("custom") or {}
    return {key: value for key, value in noted.items() if not str(key).startswith("_torchdynamo_")}


def _is_read(node: Node, key: str) -> bool:
    return node.op == "call_function" or (key == "val" and node.op != "output")


def _content(tensor: torch.Tensor) -> str:
    """Return a digest of the elements of a tensor, after the first ones."""
    if tensor.layout != torch.strided:
        return str(tensor)
    content = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.flatten()[:4].tolist()} {hashlib.sha256(content.data).hexdigest()[:16]}"


def _shared(program: ExportedProgram) -> dict[str, str]:
    """Return which entries of the tables are one object, and which use one storage: the first one of each."""
    found, firsts = {}, dict[Any, str]()
    for what in ("state_dict", "constants"):
        for key, tensor in getattr(program, what).items():
            if isinstance(tensor, torch.Tensor):
                for how, identity in (("object", id(tensor)), ("storage", tensor.untyped_storage().data_ptr())):
                    found[f"{how} of {what}.{key}"] = firsts.setdefault((how, identity), f"{what}.{key}")
    return found


def _module_call(entry: Any) -> Any:
    signature = entry.signature
    if signature is None:
        return entry.fqn, None
    arguments = [[type(one).__name__ for one in side] for side in (signature.inputs, signature.outputs)]
    return entry.fqn, (*arguments, str(signature.in_spec), str(signature.out_spec), signature.forward_arg_names)


def _verifier(kind: Any) -> dict[str, Any]:
    """Describe a verifier: its name and what it allows."""
    verifier = kind() if isinstance(kind, type) else kind
    allowed = {
        name: sorted(set(map(str, found))) if isinstance(found, (list, tuple, set)) else str(found)
        for name, found in sorted(vars(verifier).items())
        if isinstance(found, (bool, int, str, list, tuple, set))
    }
    return {"class": kind.__qualname__, "dialect": verifier.dialect} | allowed
