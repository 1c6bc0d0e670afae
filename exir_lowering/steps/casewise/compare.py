"""Whether two Edge programs are the same to all that later steps read.

Nodes are compared in order, and named by their position; names of nodes may differ (`list_differing_names`).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from executorch.exir.debug_handle_utils import get_greatest_ancestor_node_identifier
from torch.export import ExportedProgram
from torch.export.graph_signature import InputSpec, OutputSpec
from torch.fx import GraphModule, Node

from exir_lowering._upstream.conversion import calling_convention
from exir_lowering.errors import LoweringError
from exir_lowering.graphs import origins

MISSING = "missing"
_SHOWN = 10
"""How many differences an error names."""

READ = (
    "val",
    "tensor_meta",
    "stack_trace",
    "nn_module_stack",
    "source_fn_stack",
    "torch_fn",
    "from_node",
    "debug_handle",
    "quantization_tag",
    "partitioner_tag",
)
"""The metadata of operators that partitioners, backends, the emitter and reports read."""

_UNBACKED = re.compile(r"\b(?:u|zuf)\d+\b")
_CHANGING = (re.compile(r"(?<=<eval_with_key>)\.\d+"), re.compile(r"(?<= at )0x[0-9a-f]+"))


def list_differences(ours: ExportedProgram, theirs: ExportedProgram, *, limit: int = 100) -> list[str]:
    """Return what differs, readable, at most so many: "node 17 mul: val stride (1, 4) / (4, 1)", ours first."""
    return list(itertools.islice(_Comparison(ours, theirs).all(), limit))


def require_equal(method: str, ours: ExportedProgram, theirs: ExportedProgram) -> None:
    """Check that our Edge conversion of a method made what ExecuTorch's makes; else, LoweringError says where not."""
    found = list_differences(ours, theirs, limit=_SHOWN)
    if found:
        raise LoweringError(
            f'Method {method!r}: the conversions of edge="fast" and edge="executorch" differ (fast / executorch):\n  '
            + "\n  ".join(found)
            + '\nLower it with LoweringOptions(edge="executorch"), and please report this.'
        )


def list_differing_names(ours: ExportedProgram, theirs: ExportedProgram) -> list[str]:
    """Return the names of nodes, and of the modules that they call, that differ between two equal programs."""
    pairs = zip(_all_nodes(ours.graph_module), _all_nodes(theirs.graph_module), strict=False)
    return [
        f"{where}: {what} {a} / {b}"
        for (where, mine), (_, other) in pairs
        for what, a, b in (
            ("name", mine.name, other.name),
            *((("target", mine.target, other.target),) if mine.op in ("placeholder", "get_attr") else ()),
        )
        if a != b
    ]


class _Side:
    """One program, and names for what each conversion numbers anew."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self._unbacked: dict[str, str] = {}

    def text(self, value: object) -> str:
        """Describe a value; unbacked symbols by the order of their occurrence, without addresses and file numbers."""
        text = str(value)
        for changing in _CHANGING:
            text = changing.sub("", text)
        return text

    def symbolic(self, value: object) -> str:
        """Describe a symbolic expression."""
        return _UNBACKED.sub(lambda m: self._unbacked.setdefault(m[0], f"unbacked{len(self._unbacked)}"), str(value))


class _Comparison:
    """Yields the differences of two programs, part by part."""

    def __init__(self, ours: ExportedProgram, theirs: ExportedProgram) -> None:
        self.ours, self.theirs = _Side(ours), _Side(theirs)

    def all(self) -> Iterator[str]:
        ours, theirs = self.ours.program, self.theirs.program
        yield from self._graphs("", ours.graph_module, theirs.graph_module)
        yield from self._groups(ours, theirs)
        yield from self._signatures(ours, theirs)
        for what in ("state_dict", "constants"):
            yield from self._tables(what, getattr(ours, what), getattr(theirs, what))
        yield from _unequal("sharing of tensors", _shared(ours), _shared(theirs))
        yield from self._values("range_constraints", *map(_ranges, (self.ours, self.theirs)))
        yield from self._values("example_inputs", ours.example_inputs, theirs.example_inputs)
        yield from _unequal("module_call_graph", *map(_module_calls, (ours, theirs)))
        yield from _unequal("dialect", ours.dialect, theirs.dialect)
        yield from self._values("verifiers", *map(_verifiers, (ours, theirs)))

    # -- graphs ------------------------------------------------------------------------------------------------------

    def _graphs(self, path: str, ours: GraphModule, theirs: GraphModule) -> Iterator[str]:
        mine, other = list(ours.graph.nodes), list(theirs.graph.nodes)
        places = ({n: i for i, n in enumerate(mine)}, {n: i for i, n in enumerate(other)})
        for index, (a, b) in enumerate(zip(mine, other, strict=False)):
            where = f"{path}node {index} {b.name}"
            yield from _unequal(f"{where}: op", a.op, b.op)
            yield from self._targets(path, where, (ours, a), (theirs, b))
            yield from self._values(f"{where}: args", _positions(a.args, places[0]), _positions(b.args, places[1]))
            yield from self._values(
                f"{where}: kwargs", _positions(a.kwargs, places[0]), _positions(b.kwargs, places[1])
            )
            users = [[place[user] for user in node.users] for node, place in zip((a, b), places, strict=True)]
            yield from _unequal(f"{where}: users", *users)
            yield from self._meta(where, a, b)
        yield from _unequal(f"{path or 'graph: '}number of nodes", len(mine), len(other))
        yield from self._values(f"{path or 'graph: '}meta", dict(ours.meta), dict(theirs.meta))
        yield from _unequal(
            f"{path or 'graph: '}calling convention", *(calling_convention(side.graph) for side in (ours, theirs))
        )

    def _targets(
        self, path: str, where: str, ours: tuple[GraphModule, Node], theirs: tuple[GraphModule, Node]
    ) -> Iterator[str]:
        (mine, a), (other, b) = ours, theirs
        if a.op == b.op == "get_attr":
            found = [_attribute(mine, str(a.target)), _attribute(other, str(b.target))]
            if all(isinstance(one, GraphModule) for one in found):
                yield from self._graphs(f"{path}{b.target}/", *found)
            else:
                yield from self._values(f"{where}: attribute", *found)
        elif a.op == b.op == "call_function" and a.target is not b.target:
            # Edge operators are made anew by name; those of the same name and schema are equal.
            yield from _unequal(f"{where}: target", *((type(n.target).__name__, str(n.target)) for n in (a, b)))
        elif a.op not in ("placeholder", "get_attr"):
            yield from _unequal(f"{where}: target", str(a.target), str(b.target))

    def _meta(self, where: str, a: Node, b: Node) -> Iterator[str]:
        yield from self._values(f"{where}: custom", *(_custom(node) for node in (a, b)))
        for key in (key for key in READ if _is_read(b, key) and (key in a.meta or key in b.meta)):
            if key not in a.meta or key not in b.meta:
                present = ["present" if key in node.meta else MISSING for node in (a, b)]
                yield f"{where}: {key} {present[0]} / {present[1]} {_short(a.meta.get(key, b.meta.get(key)))}"
            elif key == "from_node" and isinstance(a.meta.get("val"), torch.SymInt):
                continue  # torch makes the nodes of sizes anew in each step
            elif key == "from_node":
                yield from _unequal(f"{where}: name of the ancestor", _ancestor(a)[0], _ancestor(b)[0])
                yield from _unequal(f"{where}: decomposed from", origins(a), origins(b))
            else:
                yield from self._values(f"{where}: {key}", a.meta[key], b.meta[key])

    def _groups(self, ours: ExportedProgram, theirs: ExportedProgram) -> Iterator[str]:
        """Compare which nodes have the same ancestor, value or mode, by the first node that has it."""
        nodes = [list(_all_nodes(program.graph_module)) for program in (ours, theirs)]
        kinds: tuple[tuple[str, Callable[[Node], Hashable]], ...] = (
            ("same ancestor", _ancestor),
            (
                "same val object",
                lambda node: id(node.meta["val"]) if isinstance(node.meta["val"], torch.Tensor) else node,
            ),
            ("same fake mode", lambda node: id(getattr(node.meta["val"], "fake_mode", None))),
        )
        keys = ("from_node", "val", "val")
        for (what, group), key in zip(kinds, keys, strict=True):
            firsts = [_first_of_group((node for _, node in side), key, group) for side in nodes]
            for (where, _), a, b in zip(nodes[1], *firsts, strict=False):
                if a != b and None not in (a, b):
                    yield f"{where}: {what} as node {a} / {b}"

    # -- values ------------------------------------------------------------------------------------------------------

    def _values(self, where: str, a: Any, b: Any) -> Iterator[str]:
        """Compare values of metadata and arguments, part by part."""
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            yield from self._tensors(where, a, b)
        elif isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield from _unequal(where, (type(a), self.ours.symbolic(a)), (type(b), self.theirs.symbolic(b)))
        elif type(a) is not type(b):
            yield f"{where} {type(a).__name__} {_short(a)} / {type(b).__name__} {_short(b)}"
        elif isinstance(a, (list, tuple)):
            yield from _unequal(f"{where} length", len(a), len(b))
            for index, (x, y) in enumerate(zip(a, b, strict=False)):
                yield from self._values(f"{where}[{index}]", x, y)
        elif isinstance(a, Mapping):
            yield from _unequal(f"{where} keys", [self.ours.text(k) for k in a], [self.theirs.text(k) for k in b])
            for key, x, y in zip(a, a.values(), b.values(), strict=False):
                yield from self._values(f"{where}[{key!r}]", x, y)
        elif isinstance(a, (float, complex)):
            yield from _unequal(where, repr(a), repr(b))
        elif a is not b and a != b:
            yield from _unequal(where, self.ours.text(a), self.theirs.text(b))

    def _tensors(self, where: str, a: torch.Tensor, b: torch.Tensor) -> Iterator[str]:
        if a is b:
            return
        yield from _unequal(f"{where} type", type(a).__name__, type(b).__name__)
        for what in ("shape", "stride", "storage_offset"):
            found = [getattr(t, what) for t in (a, b)]
            found = [one() if callable(one) else one for one in found]
            texts = [side.symbolic(one) for side, one in zip((self.ours, self.theirs), found, strict=True)]
            yield from _unequal(f"{where} {what}", *texts)
        for what in ("dtype", "device", "layout", "requires_grad"):
            yield from _unequal(f"{where} {what}", getattr(a, what), getattr(b, what))
        if _is_fake(a) or _is_fake(b):
            constants = [getattr(t, "constant", None) for t in (a, b)]
            yield from self._values(f"{where} constant", *constants)
        elif not _same_bits(a, b):
            yield f"{where} values {_short(a.flatten()[:4].tolist())} / {_short(b.flatten()[:4].tolist())}"

    # -- what is around the graphs -----------------------------------------------------------------------------------

    def _signatures(self, ours: ExportedProgram, theirs: ExportedProgram) -> Iterator[str]:
        for what in ("input_specs", "output_specs"):
            found = [
                [_spec(spec, program, side) for spec in getattr(program.graph_signature, what)]
                for program, side in ((ours, self.ours), (theirs, self.theirs))
            ]
            yield from self._values(f"signature: {what}", *found)

    def _tables(self, what: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
        yield from _unequal(f"{what}: keys", list(ours), list(theirs))
        for key in ours:
            if key in theirs:
                yield from self._values(f"{what}: {key}", ours[key], theirs[key])


def _unequal(where: str, a: Any, b: Any) -> Iterator[str]:
    if a != b:
        yield f"{where} {_short(a)} / {_short(b)}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 300 else f"{text[:300]}..."


def _all_nodes(module: GraphModule, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yield every node with its place, those of a nested graph where it is first referred to."""
    for index, node in enumerate(module.graph.nodes):
        yield f"{path}node {index} {node.name}", node
        nested = _attribute(module, str(node.target)) if node.op == "get_attr" else None
        if isinstance(nested, GraphModule):
            yield from _all_nodes(nested, f"{path}{node.target}/")


def _attribute(module: GraphModule, target: str) -> Any:
    found: Any = module
    for part in target.split("."):
        found = getattr(found, part, MISSING)
    return found


class _At(tuple[int]):
    """A node as an argument, by its position."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"node {self[0]}"


def _positions(value: Any, places: Mapping[Node, int]) -> Any:
    """Replace nodes by their positions; lists and tuples keep what they are."""
    if isinstance(value, Node):
        return _At((places[value],))
    if isinstance(value, tuple):
        return tuple(_positions(one, places) for one in value)
    if isinstance(value, list):
        return [_positions(one, places) for one in value]
    if isinstance(value, dict):
        return {key: _positions(one, places) for key, one in value.items()}
    if isinstance(value, slice):
        return ("slice", *(_positions(one, places) for one in (value.start, value.stop, value.step)))
    return value


def _ancestor(node: Node) -> tuple[str, str]:
    """Return the name and the graph of the node that this one was made from."""
    if not node.meta["from_node"]:
        return "", ""
    name, _, graph = get_greatest_ancestor_node_identifier(node).rpartition(".")
    return name, graph


def _first_of_group(nodes: Iterable[Node], key: str, group: Callable[[Node], Hashable]) -> list[int | None]:
    """Return for each node the number of the first one in its group; None where the metadata is missing."""
    firsts: dict[Hashable, int] = {}
    return [
        firsts.setdefault(group(node), index) if _is_read(node, key) and node.meta.get(key) is not None else None
        for index, node in enumerate(nodes)
    ]


def _custom(node: Node) -> dict[str, Any]:
    """Return what users and tools noted on a node, without what torch.compile notes about torch's own code."""
    noted = node.meta.get("custom") or {}
    return {key: value for key, value in noted.items() if not str(key).startswith("_torchdynamo_")}


def _is_read(node: Node, key: str) -> bool:
    return node.op == "call_function" or (key == "val" and node.op != "output")


def _is_fake(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "fake_mode")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != torch.strided:
        return a.shape == b.shape and str(a) == str(b)
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def _shared(program: ExportedProgram) -> dict[str, Any]:
    """Return which entries of the tables are one object, and which use one storage."""
    tables = {"state_dict": program.state_dict, "constants": program.constants}
    tensors = {f"{w}.{k}": t for w, table in tables.items() for k, t in table.items() if isinstance(t, torch.Tensor)}
    found: dict[str, Any] = {}
    for what, identity in (("object", id), ("storage", lambda t: t.untyped_storage().data_ptr())):
        keys = {name: identity(tensor) for name, tensor in tensors.items()}
        counts = Counter(keys.values())
        for name, key in keys.items():
            if counts[key] > 1:
                found[f"{what} of {name}"] = next(other for other, k in keys.items() if k == key)
    return found


def _spec(spec: InputSpec | OutputSpec, program: ExportedProgram, side: _Side) -> dict[str, Any]:
    """Describe an entry of the signature, its node by position."""
    nodes = list(program.graph.nodes)
    positions = {node.name: index for index, node in enumerate(nodes)}
    name = getattr(spec.arg, "name", None)
    described = {
        "kind": spec.kind.name,
        "target": spec.target,
        "persistent": getattr(spec, "persistent", None),
        "argument": type(spec.arg).__name__,
        "value": side.text(getattr(spec.arg, "value", None)),
    }
    # Inputs of a constant value have a placeholder, outputs do not have a node.
    return described | {"node": positions.get(name, MISSING if name is not None else None)}


def _ranges(side: _Side) -> dict[str, str]:
    found = {side.symbolic(symbol): side.symbolic(r) for symbol, r in side.program.range_constraints.items()}
    return dict(sorted(found.items()))


def _module_calls(program: ExportedProgram) -> list[Any]:
    def describe(signature: Any) -> Any:
        arguments = [[type(one).__name__ for one in side] for side in (signature.inputs, signature.outputs)]
        return *arguments, str(signature.in_spec), str(signature.out_spec), signature.forward_arg_names

    return [(entry.fqn, entry.signature and describe(entry.signature)) for entry in program.module_call_graph]


def _verifiers(program: ExportedProgram) -> Sequence[Any]:
    """Describe the verifiers: their names and what they allow."""
    described = []
    for kind in program.verifiers:
        verifier = kind() if isinstance(kind, type) else kind
        plain = {k: v for k, v in sorted(vars(verifier).items()) if isinstance(v, (bool, int, str, list, tuple, set))}
        allowed = {
            k: sorted(set(map(str, v))) if isinstance(v, (list, tuple, set)) else str(v) for k, v in plain.items()
        }
        described.append({"class": kind.__qualname__, "dialect": verifier.dialect} | allowed)
    return described
