"""Find a small operator graph in a large one, from one node on, and say what differed where it nearly is."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.graphs.order import reach
from exir_lowering.partitioners.supports.support import GraphScope
from exir_lowering.partitioners.supports.templates import (
    ANY,
    Attribute,
    HeldNumber,
    Template,
    TemplateInput,
    TemplateOperator,
    list_argument_names,
    order_arguments,
)

_COMMUTATIVE = frozenset(
    {
        "aten.add.Tensor", "aten.bitwise_and.Tensor", "aten.bitwise_or.Tensor", "aten.bitwise_xor.Tensor",
        "aten.eq.Tensor", "aten.fmax.default", "aten.fmin.default", "aten.logical_and.default",
        "aten.logical_or.default", "aten.logical_xor.default", "aten.maximum.default", "aten.minimum.default",
        "aten.mul.Tensor", "aten.ne.Tensor",
    }
)  # fmt: skip
"""Operators whose first two operands may be in either order; add only if its third one, alpha, is 1."""

Accept = Callable[[tuple[Node, ...], Mapping[str, Any], tuple[Node, ...]], bool]
"""Whether to take a match, given its nodes, inputs and results."""

_Todo = tuple[Any, Any, Any] | None
"""What is left to compare: part of a pattern, a node or value, and the rest: a linked list that choices share."""


_END: Any = object()


class SearchedGraph:
    """A graph, which of its nodes are taken, and why others nearly were; see `Matching`."""

    def __init__(self, scope: GraphScope) -> None:
        self.scope = scope
        self.nodes = list(scope.graph_module.graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.name = {node: graphs.operator_name(node) for node in self.nodes if node.op == "call_function"}
        self.by_name: dict[str, list[Node]] = {}
        for node, name in self.name.items():
            self.by_name.setdefault(name, []).append(node)
        self.taken: dict[Node, str] = {}
        self.reasons: dict[Node, tuple[int, str]] = {}
        self.nearest: dict[int, tuple[Node, str]] = {}
        self.users: dict[Node, dict[str, deque[Node]]] = {}
        self.comparisons = 0

    def ordered(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """Return nodes in graph order."""
        return tuple(sorted(nodes, key=self.position.__getitem__))

    def free_users(self, node: Node, name: str) -> Iterator[Node]:
        """Yield a node's users with a name that are in no match, in graph order; each is skipped once."""
        if node not in self.users:
            table = self.users[node] = {}
            for user in self.ordered(node.users):
                table.setdefault(self.name.get(user, ""), deque()).append(user)
        waiting = self.users[node].get(name, deque())
        while waiting and waiting[0] in self.taken:
            waiting.popleft()
        yield from (user for user in waiting if user not in self.taken)

    def is_constant(self, value: Any) -> bool:
        """Return whether a value is a node that stands for a parameter, buffer or constant."""
        return isinstance(value, Node) and (value in self.scope.constants or value.op == "get_attr")

    def holds(self, node: Any, number: torch.Tensor) -> bool:
        """Return whether a node is a constant that the graph shows to be a number."""
        if not self.is_constant(node):
            return False
        if node.op == "get_attr":
            value = graphs.attribute(self.scope.graph_module, str(node.target))
        else:
            value = getattr(node.meta.get("val"), "constant", None)
        return isinstance(value, torch.Tensor) and value.dtype == number.dtype and torch.equal(value, number)


class Search:
    """The search for one match, starting at an anchor, with backtracking."""

    def __init__(self, graph: SearchedGraph, template: Template, accept: Accept) -> None:
        self.graph, self.template, self.accept = graph, template, accept
        self.bound: dict[TemplateOperator | TemplateInput, Any] = {}
        self.term_of: dict[Node, TemplateOperator] = {}
        self.reason = ""
        self.refused: tuple[Node, ...] = ()
        self.missed: tuple[Node, ...] = ()  # where it came furthest, and what differed there
        self.difference = ""
        self.left = 1024 + 64 * len(self.template.operators)

    def run(self, anchor: Node) -> tuple[Node, ...] | None:
        """Return the nodes of an accepted match whose last operator is the anchor."""
        start: _Todo = (self.template.operators[-1], anchor, None)
        choices: list[tuple[Iterator[_Todo], int]] = [(iter((start,)), 0)]
        while choices and self.left > 0:
            options, mark = choices[-1]
            while len(self.bound) > mark:  # take back what was bound for an earlier choice
                term, value = self.bound.popitem()
                if isinstance(term, TemplateOperator):
                    del self.term_of[value]
            if (found := next(options, _END)) is _END:
                choices.pop()
                continue
            todo: _Todo = found
            further = self._go_up() if todo is None else iter(self._compare(*todo))
            if further is not None:
                choices.append((further, len(self.bound)))
            elif (nodes := self._finish()) is not None:
                return nodes
        if self.left <= 0:
            self._refuse((anchor,), "there are too many ways to compare it with the graph")
        elif self.missed:
            self._refuse(self.missed, self.difference)
        return None

    def _refuse(self, nodes: tuple[Node, ...], reason: str) -> None:
        if not self.refused:
            self.reason, self.refused = reason, nodes

    def _miss(self, nodes: Iterable[Node], difference: str) -> None:
        """Note what differs, where more of the pattern was found than before."""
        near = self.graph.ordered(nodes)
        if len(near) > len(self.missed):
            self.missed, self.difference = near, difference

    def _compare(self, term: Any, value: Any, rest: _Todo) -> list[_Todo]:
        """Return the ways to continue if a part of the pattern and a node or value fit; empty if they do not."""
        self.graph.comparisons += 1
        self.left -= 1
        if isinstance(term, (TemplateOperator, TemplateInput)) and term in self.bound:
            return [rest] if _is_same(self.bound[term], value) else []
        if isinstance(term, TemplateOperator):
            return self._compare_operator(term, value, rest)
        if isinstance(term, (list, tuple)):
            same = isinstance(value, (list, tuple)) and len(term) == len(value)
            return [_push(term, value, rest)] if same else []
        if not self._fits(term, value):
            if isinstance(term, TemplateInput):
                why = f"is {value.name}, no constant" if isinstance(value, Node) else "is no value of the graph"
                self._miss(self.term_of, f"its input {term.name} {why}")
            return []
        if isinstance(term, TemplateInput):
            self.bound[term] = value
        return [rest]

    def _compare_operator(self, term: TemplateOperator, value: Any, rest: _Todo) -> list[_Todo]:
        if not self._fits(term, value):
            return []
        if value in self.graph.taken:
            why = f"node {value.name} is in a match of pattern {self.graph.taken[value]}"
            self._refuse(self.graph.ordered(self.term_of), why)
            return []
        name = self.graph.name[value]
        wanted, got = term.arguments[name], order_arguments(name, value.args, value.kwargs)
        if len(wanted) != len(got):
            return []
        # Plain values first, which depend on nothing else, except of operands that may be swapped.
        for number in range(2 if name in _COMMUTATIVE else 0, len(wanted)):
            if _is_plain(wanted[number]) and not self._fits(wanted[number], got[number]):
                self._miss((*self.term_of, value), _describe_miss(name, number, value, wanted[number], got[number]))
                return []
        self.bound[term] = value
        self.term_of[value] = term
        commutes = name in _COMMUTATIVE and (len(got) == 2 or (not isinstance(got[2], Node) and got[2] == 1))
        if not commutes or _is_same(got[0], got[1]):
            return [_push(wanted, got, rest)]
        # One level ahead, so that most operands have one order only.
        ways = (got, (got[1], got[0], *got[2:]))
        return [_push(wanted, way, rest) for way in ways if all(map(self._fits, wanted[:2], way[:2]))]

    def _fits(self, term: Any, value: Any) -> bool:
        """Return whether a part of the pattern and a node or value may fit, without their operands."""
        if isinstance(term, (TemplateOperator, TemplateInput)) and term in self.bound:
            return _is_same(self.bound[term], value)
        if isinstance(term, TemplateOperator):
            return (
                isinstance(value, Node) and value not in self.term_of and self.graph.name.get(value) in term.arguments
            )
        if isinstance(term, TemplateInput):
            if term.constant and not term.wildcard:
                return self.graph.is_constant(value)
            return term.wildcard or (value is not None and value is not inspect.Parameter.empty)
        if isinstance(term, HeldNumber):
            return self.graph.holds(value, term.value)
        if isinstance(term, Attribute):
            return term.fits(value)
        if isinstance(term, (list, tuple)) and _is_plain(term):
            same = isinstance(value, (list, tuple)) and len(term) == len(value)
            return same and all(map(self._fits, term, value))
        return term is ANY or (not isinstance(value, Node) and bool(term == value))

    def _go_up(self) -> Iterator[_Todo] | None:
        """Go from a bound operator to one that is not bound; None if all are."""
        missing = [term for term in self.template.operators if term not in self.bound]
        for term in missing:
            for source in term.read():
                node = self.bound.get(source)
                if isinstance(node, Node):
                    return self._users_like(term, node)
        return iter(()) if missing else None

    def _users_like(self, term: TemplateOperator, node: Node) -> Iterator[_Todo]:
        for name in term.arguments:
            for user in self.graph.free_users(node, name):
                self.left -= 1
                if user not in self.term_of:
                    yield term, user, None

    def _finish(self) -> tuple[Node, ...] | None:
        """Check a complete match, and return its nodes if it is valid."""
        results = tuple(self.bound[term] for term in self.template.results)
        following = [u for n in self.term_of for u in n.users if graphs.is_getitem(u) and u not in self.term_of]
        nodes = self.graph.ordered([*self.term_of, *(u for u in following if u.args[0] in results or not u.users)])
        inputs = {term.name: value for term, value in self.bound.items() if isinstance(term, TemplateInput)}
        reason = self._find_fault(nodes, results, inputs)
        if not reason and not self.accept(nodes, inputs, results):
            reason = "its check refused it"
        if reason:
            self._refuse(nodes, reason)
        return None if reason else nodes

    def _find_fault(self, nodes: Sequence[Node], results: Sequence[Node], inputs: Mapping[str, Any]) -> str:
        """Return why nodes cannot be replaced by one that has these inputs and results, "" if they can."""
        inside = set(nodes)
        for node in nodes:
            if node in results or (graphs.is_getitem(node) and node.args[0] in results):
                continue
            for user in node.users:
                if user not in inside:
                    return f"{node.name}, which is not among its results, is used outside of it by {user.name}"
        for name, value in inputs.items():
            held: list[Node] = []
            torch.fx.node.map_arg((value,), held.append)
            if not inside.isdisjoint(held):
                return f"its input {name} would be {held[0].name}, which is inside the match"
        if len(results) == 1:
            return ""
        last = self.graph.position[nodes[-1]]
        leaving = [(node, user) for node in reversed(nodes) for user in node.users if user not in inside]
        seen = reach(
            leaving,
            lambda node: () if node in inside else node.users,
            lambda node: node in inside or self.graph.position[node] < last,
        )
        back = next((node for node in nodes if node in seen), None)
        if back is None:
            return ""
        path = [back, seen[back]]
        while path[-1] not in inside:
            path.append(seen[path[-1]])
        return f"the path {' -> '.join(node.name for node in reversed(path))} leaves it and comes back"


def _is_plain(term: Any) -> bool:
    """Return whether part of a pattern is about values only, not about nodes."""
    if isinstance(term, (list, tuple)):
        return all(map(_is_plain, term))
    return not isinstance(term, (TemplateOperator, TemplateInput, HeldNumber))


def _push(terms: Sequence[Any], values: Sequence[Any], rest: _Todo) -> _Todo:
    for term, value in zip(reversed(terms), reversed(values), strict=True):
        rest = (term, value, rest)
    return rest


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Node) or isinstance(other, Node):
        return one is other
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _describe_miss(operator: str, number: int, node: Node, wanted: Any, got: Any) -> str:
    """Say how an argument of a node differs from what a pattern says."""
    names = list_argument_names(operator)
    name = names[number] if number < len(names) else f"argument {number}"
    shown = "omitted" if got is inspect.Parameter.empty else got.name if isinstance(got, Node) else repr(got)
    expected = str(wanted) if isinstance(wanted, Attribute) else repr(wanted)
    return f"{name} of {node.name} is {shown}, the pattern says {expected}"
