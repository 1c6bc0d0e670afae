"""In-place operators on intermediate values: what is read after one of them is its result.

Composite operators return what they are given, or views of it, only where they declare it: others that do so, in a
program that writes, were replaced before (`graphs.inlining`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from networkx.utils import UnionFind
from torch.fx import Graph, Node

from exir_lowering import graphs
from exir_lowering._upstream import operators
from exir_lowering._upstream.fakes import FakeTensorMode
from exir_lowering._upstream.programs import pytree
from exir_lowering._upstream.tensors import version
from exir_lowering._upstream.value_keys import MEMORY, evaluate, renew
from exir_lowering.errors import ignoring_errors
from exir_lowering.fast.calls import CallKeys
from exir_lowering.graphs.measures import tensors


def _shared(node: Node) -> Iterator[Node]:
    """Yield the operands whose memory a node's result may be in."""
    if node.op != "call_function":
        return
    if not operators.is_overload(node.target):
        yield from node.all_input_nodes
        return
    for argument in operators.list_arguments(node.target):
        if argument.aliased:
            given = pytree.tree_leaves(graphs.argument(node, argument.name))
            yield from (each for each in given if isinstance(each, Node))


def _is_new(node: Node) -> bool:
    """Return whether a node's result is in separate memory."""
    return not any(True for _ in _shared(node))


def _writes_nothing(node: Node, mode: FakeTensorMode) -> bool:
    """Return whether an in-place operator writes nothing, such as dropout in inference, which is composite."""
    if not operators.is_composite(node.target):
        return False
    call = CallKeys().call(node, node.target, [one.meta.get("val") for one in node.all_input_nodes], None)
    key = ("writes nothing", call.key)
    known: tuple[bool] | None = None if call.local else MEMORY.find(key)
    if known is None:
        own = [renew(value, mode, gradients=False) for value in call.values]
        before = [version(tensor) for tensor in tensors(own)]
        known = (False,)
        with ignoring_errors():
            evaluate(node, node.target, dict(zip(call.operands, own, strict=True)).__getitem__, mode, gradients=False)
            known = (before == [version(tensor) for tensor in tensors(own)],)
        if not call.local:
            MEMORY.put(key, known)
    return known[0]


def read_results(graph: Graph, mode: FakeTensorMode) -> list[Node]:
    """Make what is read after in-place operators their results; return those that change what is read elsewhere."""
    mutating = [node for node in graph.nodes if is_mutable(node)]
    if not mutating:
        return []
    places: Any = UnionFind(graph.nodes)
    for node in graph.nodes:
        places.union(node, *_shared(node))
    members: dict[Node, list[Node]] = defaultdict(list)  # what may share memory, in order
    for node in graph.nodes:
        members[places[node]].append(node)
    order = {node: index for index, node in enumerate(graph.nodes)}
    left = []
    for node in mutating:
        if _writes_nothing(node, mode):
            continue
        versions, shared = _list_versions(node), members[places[node]]
        # Nothing else that may share the memory is an input, or is read after the write; and torch makes views of what
        # was written when they are first read.
        others = [member for member in shared if order[member] < order[node] and member not in versions]
        if (
            not versions
            or not _is_new(versions[-1])
            or any(one.op != "call_function" or any(order[user] >= order[node] for user in one.users) for one in others)
            or any(order[one] > order[node] and not is_mutable(one) and not _is_new(one) for one in shared)
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
