"""In-place operators on intermediate values: what is read after one of them is its result."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from exir_lowering._upstream.conversion import is_composite


class _Aliases:
    """Which values of a graph may share memory."""

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[Node, Node] = {}
        self._members: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            for operand in _may_share(node):
                if self.root(operand) is not self.root(node):
                    self._parent[self.root(operand)] = self.root(node)
        for node in graph.nodes:
            self._members.setdefault(self.root(node), []).append(node)

    def root(self, node: Node) -> Node:
        """Return the same node for all values that may share memory."""
        while node in self._parent:
            above = self._parent[node]
            if above in self._parent:
                self._parent[node] = self._parent[above]
            node = above
        return node

    def of(self, node: Node) -> list[Node]:
        """Return the values that may share memory with one, with itself, in order."""
        return self._members[self.root(node)]


def _may_share(node: Node) -> Iterator[Node]:
    """Yield the operands whose memory a node's result may be in."""
    if node.op != "call_function":
        return
    if type(node.target) is not torch._ops.OpOverload or is_composite(node.target):
        yield from node.all_input_nodes  # composite operators may return what they are given, whatever they declare
        return
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            yield from _nodes(value)


def _nodes(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _nodes(entry)


def written_operand(node: Node) -> Node | None:
    """Return the one operand that an operator overwrites and returns; None if it does not, or does more."""
    schema = node.target._schema  # type: ignore[union-attr]
    written = [index for index, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    returned = [r.alias_info is not None and r.alias_info.is_write for r in schema.returns]
    if written != [0] or returned != [True] or not node.args or not isinstance(node.args[0], Node):
        return None
    return node.args[0]


def read_results(graph: Graph) -> None:
    """Make what is read after an in-place operator its result, wherever that is all it changes.

    Args:
        graph: The graph; it computes the same afterwards. Operators that write into inputs, or into what is also seen
            through a view, stay as they are: `is_settled` tells them apart.
    """
    mutating = [node for node in graph.nodes if is_mutable(node)]
    if not mutating:
        return
    aliases = _Aliases(graph)
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in mutating:
        written = written_operand(node)
        if written is not None and _only_seen_through(node, written, aliases, order):
            for member in aliases.of(node):
                if order[member] < order[node]:
                    later = [user for user in member.users if order[user] > order[node]]
                    member.replace_all_uses_with(node, delete_user_cb=later.__contains__)


def is_settled(node: Node) -> bool:
    """Return whether nothing reads what an in-place operator has overwritten, except through its result."""
    written = written_operand(node)
    return written is not None and written.op == "call_function" and _last_user(written) is node


def _last_user(node: Node) -> Node:
    last = node
    users = set(node.users)
    following = node.next
    while following.op != "root":
        if following in users:
            last = following
        following = following.next
    return last


def is_mutable(node: Node) -> bool:
    """Return whether a node's operator writes into an operand."""
    return (
        node.op == "call_function"
        and type(node.target) is torch._ops.OpOverload
        and bool(node.target._schema.is_mutable)
    )


def _only_seen_through(node: Node, written: Node, aliases: _Aliases, order: dict[Node, int]) -> bool:
    """Return whether an in-place operator changes only values that in-place operators on them return."""
    for member in aliases.of(node):
        if member.op != "call_function" or member.target is operator.getitem:
            return False
        if order[member] >= order[node]:
            continue
        chained = written_operand(member) if is_mutable(member) else None
        fresh = not any(True for _ in _may_share(member))
        if chained is None and not fresh and any(order[user] >= order[node] for user in member.users):
            return False
    return written.op == "call_function"
