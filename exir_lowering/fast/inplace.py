"""In-place operators on intermediate values: what is read after one of them is its result."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from networkx.utils import UnionFind
from torch.fx import Graph, Node

from exir_lowering import graphs
from exir_lowering._upstream import operators
from exir_lowering._upstream.fakes import FakeTensorMode
from exir_lowering._upstream.programs import pytree
from exir_lowering._upstream.tensors import version
from exir_lowering._upstream.value_keys import MEMORY, evaluate, renew
from exir_lowering.fast.calls import CallKeys, DistinctCall
from exir_lowering.graphs.inlining import storages_of
from exir_lowering.graphs.measures import tensors


class _Found(NamedTuple):
    """What is found out about a call by running it."""

    shared: tuple[int, ...]  # the numbers of the operands whose memory its result is in
    is_view: bool = False  # whether the result is another tensor in that memory
    untouched: bool = False  # whether it writes nothing, such as dropout in inference


def _run(call: DistinctCall, mode: FakeTensorMode, *, gradients: bool) -> _Found:
    """Find out about a call; if it fails, it may share memory with all operands."""
    own = [renew(value, mode, gradients=gradients) for value in call.values]
    before = [version(tensor) for tensor in tensors(own)]
    value_of = dict(zip(call.operands, own, strict=True)).__getitem__
    try:
        result = evaluate(call.node, call.node.target, value_of, mode, gradients=False)
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
        self._keys, self._mode = CallKeys(), mode
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
                    given = pytree.tree_leaves(graphs.argument(node, argument.name))
                    yield from (each for each in given if isinstance(each, Node))

    def _found(self, node: Node, *, gradients: bool = True) -> _Found:
        """Return what is found out by running a call, once for equal ones."""
        call = self._keys.call(node, node.target, [one.meta.get("val") for one in node.all_input_nodes], None)
        key = ("memory", gradients, call.key)
        known: _Found | None = None if call.local else MEMORY.find(key)
        if known is None:
            known = _run(call, self._mode, gradients=gradients)
            if not call.local:
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
        versions, shared = _list_versions(node), aliases.of(node)
        # Nothing else that may share the memory is an input, or is read after the write; and torch makes views of what
        # was written when they are first read.
        others = [member for member in shared if order[member] < order[node] and member not in versions]
        if (
            not versions
            or not aliases.is_new(versions[-1])
            or any(one.op != "call_function" or any(order[user] >= order[node] for user in one.users) for one in others)
            or any(order[member] > order[node] and aliases.is_view(member) for member in shared)
        ):
            left.append(node)
            continue
        for earlier in versions:
            later = [user for user in earlier.users if order[user] > order[node]]
            earlier.replace_all_uses_with(node, delete_user_cb=later.__contains__)
    return left


def is_mutable(node: Node) -> bool:
    """Return whether a node's operator writes into an operand."""
    return node.op == "call_function" and operators.mutates_arguments(node.target)


def _list_versions(node: Node) -> list[Node]:
    """Return the nodes that stand for what is overwritten: what made it, or a view of it, and the writes in between.

    Empty if an operator does not overwrite and return one operand, or that is an input.
    """
    versions = []
    written: Any = node
    while operators.is_overload(written.target):
        overwrites = [argument.written for argument in operators.list_arguments(written.target)]
        returned = [each.alias_info is not None and each.alias_info.is_write for each in written.target._schema.returns]
        if overwrites != [True] + [False] * (len(overwrites) - 1) or returned != [True]:
            return []
        written = written.args[0] if written.args else None
        if not isinstance(written, Node) or written.op != "call_function":
            return []
        versions.append(written)
        if not is_mutable(written):
            return versions
    return []
