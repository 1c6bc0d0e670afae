"""In-place operators on intermediate values: what is read after one of them is its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.fx import Graph, Node

from exir_lowering._upstream.fakes import FakeTensorMode
from exir_lowering._upstream.schemas import (
    is_composite,
    is_overload,
    list_arguments,
    returns_what_it_overwrites,
    writes,
)
from exir_lowering.steps.casewise.cases import Describer
from exir_lowering.steps.casewise.evaluation import leaves_as_it_is, shared_operands, viewed_operands
from exir_lowering.steps.casewise.memory import MEMORY


class _Aliases:
    """Which values of a graph may share memory."""

    def __init__(self, graph: Graph, mode: FakeTensorMode) -> None:
        self._describer, self._mode = Describer(), mode
        self._parent: dict[Node, Node] = {}
        self._members: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            for operand in self._shared(node):
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

    def _shared(self, node: Node) -> Iterator[Node]:
        """Yield the operands whose memory a node's result may be in."""
        if node.op != "call_function":
            return
        if not is_overload(node.target):
            yield from node.all_input_nodes
        elif is_composite(node.target):
            yield from self._shared_by_composite(node)  # it may return what it is given, whatever it declares
        else:
            for index, argument in enumerate(list_arguments(node.target)):
                if argument.is_aliased:
                    value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
                    yield from _nodes(value)

    def _shared_by_composite(self, node: Node) -> Iterator[Node]:
        yield from (node.all_input_nodes[index] for index in self._found("shared", node, shared_operands))

    def _found(self, what: str, node: Node, find: Callable[[Node, Sequence[Any], FakeTensorMode], Any]) -> Any:
        """Return what is found out by running a call, once for each case."""
        case = self._describer.case(node, node.target, [one.meta.get("val") for one in node.all_input_nodes], None)
        known = None if case.local else MEMORY.get((what, case.key))
        if known is None:
            known = (find(node, case.values, self._mode),)
            if not case.local:
                MEMORY.put((what, case.key), known)
        return known[0]

    def untouched_by(self, node: Node) -> bool:
        """Return whether an in-place operator writes nothing."""
        return is_composite(node.target) and bool(self._found("untouched", node, leaves_as_it_is))

    def is_view(self, node: Node) -> bool:
        """Return whether a node's result is another tensor in the memory of an operand."""
        if node.op != "call_function" or is_mutable(node):
            return False
        if is_composite(node.target):
            return bool(self._found("viewed", node, viewed_operands))
        return not self.is_new(node)

    def is_new(self, node: Node) -> bool:
        """Return whether a node's result is in memory of its own."""
        return not any(True for _ in self._shared(node))

    def of(self, node: Node) -> list[Node]:
        """Return the values that may share memory with one, with itself, in order."""
        return self._members[self.root(node)]


def _nodes(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _nodes(entry)


def written_operand(node: Node) -> Node | None:
    """Return the one operand that an operator overwrites and returns; None if it does not, or does more."""
    if not is_overload(node.target) or not returns_what_it_overwrites(node.target):
        return None
    return node.args[0] if node.args and isinstance(node.args[0], Node) else None


def read_results(graph: Graph, mode: FakeTensorMode) -> list[Node]:
    """Make what is read after an in-place operator its result, wherever that is all it changes.

    Return the operators that write into inputs, or into what is also seen through a view; they stay as they are.
    """
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
        for version in versions:
            later = [user for user in version.users if order[user] > order[node]]
            version.replace_all_uses_with(node, delete_user_cb=later.__contains__)
    return left


def is_mutable(node: Node) -> bool:
    """Return whether a node's operator writes into an operand."""
    return node.op == "call_function" and writes(node.target)


def _list_versions(node: Node) -> list[Node] | None:
    """Return the nodes that stand for what an in-place operator overwrites, as it was before.

    They are the node that made it, or a view of it, and the in-place operators on it in between.
    """
    versions = []
    version = written_operand(node)
    while version is not None and version.op == "call_function":
        versions.append(version)
        if not is_mutable(version):
            return versions
        version = written_operand(version)
    return None


def _only_seen_as(versions: list[Node], node: Node, aliases: _Aliases, order: dict[Node, int]) -> bool:
    """Return whether nothing else that may share the memory is an input, or is read after the write."""
    others = [member for member in aliases.of(node) if order[member] < order[node] and member not in versions]
    return all(
        member.op == "call_function" and all(order[user] < order[node] for user in member.users) for member in others
    )
