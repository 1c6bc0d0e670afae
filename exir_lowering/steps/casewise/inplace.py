"""In-place operators on intermediate values: what is read after one of them is its result."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from networkx.utils import UnionFind
from torch.fx import Graph, Node

from exir_lowering import graphs
from exir_lowering._upstream import operators
from exir_lowering._upstream.fakes import FakeTensorMode
from exir_lowering._upstream.tensors import version
from exir_lowering.graphs.measures import tensors
from exir_lowering.steps.casewise.cases import Describer
from exir_lowering.steps.casewise.value_keys import MEMORY, evaluate, renew, storages_of


class _Found(NamedTuple):
    """What is found out about a call by running it."""

    shared: tuple[int, ...]  # the numbers of the operands whose memory its result is in
    is_view: bool = False  # whether the result is another tensor in that memory
    untouched: bool = False  # whether it writes nothing, such as dropout in inference


def _run(node: Node, values: Sequence[Any], mode: FakeTensorMode, *, gradients: bool) -> _Found:
    """Find out about a call, by the values of `node.all_input_nodes`; if it fails, it may share memory with all."""
    own = [renew(value, mode, gradients=gradients) for value in values]
    before = [version(tensor) for tensor in tensors(own)]
    value_of = dict(zip(node.all_input_nodes, own, strict=True)).__getitem__
    try:
        result = evaluate(node, node.target, value_of, mode, gradients=False)
    except MemoryError:
        raise
    except Exception:
        result = None
    if result is None:
        return _Found(tuple(range(len(own))))
    storages, returned = storages_of(result), set(map(id, tensors(result)))
    shared = tuple(index for index, value in enumerate(own) if storages & storages_of(value))
    is_view = any(not returned <= set(map(id, tensors(own[index]))) for index in shared)
    return _Found(shared, is_view, before == [version(tensor) for tensor in tensors(own)])


class _Aliases:
    """Which values of a graph may share memory."""

    def __init__(self, graph: Graph, mode: FakeTensorMode) -> None:
        self._describer, self._mode = Describer(), mode
        self._places: Any = UnionFind(graph.nodes)
        for node in graph.nodes:
            self._places.union(node, *self._shared(node))
        self._members: dict[Node, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            self._members[self._places[node]].append(node)

    def _shared(self, node: Node) -> Iterator[Node]:
        """Yield the operands whose memory a node's result may be in."""
        if node.op != "call_function":
            return
        if not operators.is_overload(node.target):
            yield from node.all_input_nodes
        elif operators.is_composite(node.target):  # it may return what it is given, whatever it declares
            yield from (node.all_input_nodes[index] for index in self._found(node).shared)
        else:
            for argument in operators.list_arguments(node.target):
                if argument.aliased:
                    yield from _nodes(graphs.argument(node, argument.name))

    def _found(self, node: Node, *, gradients: bool = True) -> _Found:
        """Return what is found out by running a call, once for each case."""
        case = self._describer.case(node, node.target, [one.meta.get("val") for one in node.all_input_nodes], None)
        key = ("memory", gradients, case.key)
        known: _Found | None = None if case.local else MEMORY.find(key)
        if known is None:
            known = _run(node, case.values, self._mode, gradients=gradients)
            if not case.local:
                MEMORY.put(key, known)
        return known

    def untouched_by(self, node: Node) -> bool:
        """Return whether an in-place operator writes nothing."""
        return operators.is_composite(node.target) and self._found(node, gradients=False).untouched

    def is_view(self, node: Node) -> bool:
        """Return whether a node's result is another tensor in the memory of an operand."""
        if node.op != "call_function" or is_mutable(node):
            return False
        return self._found(node).is_view if operators.is_composite(node.target) else not self.is_new(node)

    def is_new(self, node: Node) -> bool:
        """Return whether a node's result is in separate memory."""
        return not any(True for _ in self._shared(node))

    def of(self, node: Node) -> list[Node]:
        """Return the values that may share memory with one, with itself, in order."""
        return self._members[self._places[node]]


def _nodes(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _nodes(entry)


def written_operand(node: Node) -> Node | None:
    """Return the one operand that an operator overwrites and returns; None if it does not, or does more."""
    if not operators.is_overload(node.target) or not operators.returns_what_it_overwrites(node.target):
        return None
    return node.args[0] if node.args and isinstance(node.args[0], Node) else None


def read_results(graph: Graph, mode: FakeTensorMode) -> list[Node]:
    """Make what is read after in-place operators their results; return those that change what is read elsewhere."""
    mutating = [node for node in graph.nodes if is_mutable(node)]
    if not mutating:
        return []
    aliases = _Aliases(graph, mode)
    order = {node: index for index, node in enumerate(graph.nodes)}
    left = []
    for node in mutating:
        if aliases.untouched_by(node):
            continue
        versions = _list_versions(node)
        if versions is None or not aliases.is_new(versions[-1]) or not _only_seen_as(versions, node, aliases, order):
            left.append(node)
            continue
        if any(order[member] > order[node] and aliases.is_view(member) for member in aliases.of(node)):
            left.append(node)  # torch makes views of what was written when they are first read
            continue
        for earlier in versions:
            later = [user for user in earlier.users if order[user] > order[node]]
            earlier.replace_all_uses_with(node, delete_user_cb=later.__contains__)
    return left


def is_mutable(node: Node) -> bool:
    """Return whether a node's operator writes into an operand."""
    return node.op == "call_function" and operators.writes(node.target)


def _list_versions(node: Node) -> list[Node] | None:
    """Return the nodes that stand for what is overwritten: what made it, or a view of it, and the writes in between."""
    versions = []
    written = written_operand(node)
    while written is not None and written.op == "call_function":
        versions.append(written)
        if not is_mutable(written):
            return versions
        written = written_operand(written)
    return None


def _only_seen_as(versions: list[Node], node: Node, aliases: _Aliases, order: dict[Node, int]) -> bool:
    """Return whether nothing else that may share the memory is an input, or is read after the write."""
    others = [member for member in aliases.of(node) if order[member] < order[node] and member not in versions]
    return all(
        member.op == "call_function" and all(order[user] < order[node] for user in member.users) for member in others
    )
