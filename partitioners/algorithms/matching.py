"""Find the matches of small operator graphs in a large one: by operator name, from one anchor each, bounded."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import networkx as nx
import torch
from torch.fx import Node
from torch.fx.operator_schemas import get_signature_for_torch_op

from exir_lowering import graphs
from exir_lowering.partitioners.supports.support import Scope

GETITEM = "getitem"

_COMMUTATIVE = frozenset(
    {
        "aten.add.Tensor", "aten.bitwise_and.Tensor", "aten.bitwise_or.Tensor", "aten.bitwise_xor.Tensor",
        "aten.eq.Tensor", "aten.fmax.default", "aten.fmin.default", "aten.logical_and.default",
        "aten.logical_or.default", "aten.logical_xor.default", "aten.maximum.default", "aten.minimum.default",
        "aten.mul.Tensor", "aten.ne.Tensor",
    }
)  # fmt: skip
"""Operators whose first two operands may be given in either order; add only when its third one, alpha, is 1."""

_ROUNDS = 8
"""How often one match of each cycle is given up; then half of them are, so that the rounds stay few."""


class _Wildcard:
    """Matches anything."""

    def __repr__(self) -> str:
        return "ANY"


ANY: Any = _Wildcard()
"""As an argument in a pattern: matches any node, number or list, or nothing at all."""


@dataclass(frozen=True, slots=True)
class Input:
    """A parameter of a pattern: a node or value from outside of the match; `constant` and `wildcard` say which."""

    name: str
    constant: bool = False
    wildcard: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A number that export made a constant tensor of: matches a constant with the same value."""

    value: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """An operator of a pattern.

    Attributes:
        arguments: For each name that it may have, the arguments in the order of the schema. An argument is an
            `Operator`, an `Input`, a `Held`, `ANY`, a sequence of these, or a plain value.
    """

    arguments: Mapping[str, tuple[Any, ...]]

    def read(self) -> Iterator[Operator | Input]:
        """Yield the operators and inputs among the arguments."""
        for terms in self.arguments.values():
            yield from _read(terms)


def _read(term: Any) -> Iterator[Operator | Input]:
    if isinstance(term, (Operator, Input)):
        yield term
    elif isinstance(term, (list, tuple)):
        for item in term:
            yield from _read(item)


@dataclass(frozen=True, slots=True)
class Template:
    """The graph of a pattern.

    Attributes:
        operators: Its operators in topological order; the last one is the anchor.
        results: The operators whose values may be used outside of a match.
    """

    operators: tuple[Operator, ...]
    results: tuple[Operator, ...]

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The names that each operator may have."""
        return tuple(tuple(term.arguments) for term in self.operators)


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is looked for: a template, and who may refuse a match of it.

    Attributes:
        name: What people call it.
        template: The graph.
        priority: Who goes first.
        accept: Given nodes, inputs and results, whether to take the match.
    """

    name: str
    template: Template
    priority: int
    accept: Callable[[tuple[Node, ...], Mapping[str, Any], tuple[Node, ...]], bool]


@dataclass(frozen=True, slots=True)
class Found:
    """A match: the number of its candidate, and its nodes in graph order."""

    candidate: int
    nodes: tuple[Node, ...]


@dataclass(slots=True)
class Matching:
    """The matches of one graph.

    Attributes:
        found: The chosen matches in topological order, by their last nodes where that is free.
        reasons: For nodes that were close to being in a match, the candidate's number and why they are not.
        nearest: For candidates without a match, the node where the first one was close, and why it is none.
        comparisons: How many times a part of a pattern was compared with a node or value.
    """

    found: list[Found] = field(default_factory=list)
    reasons: dict[Node, tuple[int, str]] = field(default_factory=dict)
    nearest: dict[int, tuple[Node, str]] = field(default_factory=dict)
    comparisons: int = 0


@cache
def _signature(name: str) -> inspect.Signature | None:
    """Return the signature of an operator, None when it has no schema."""
    parts = name.split(".")
    if len(parts) != 3:
        return None
    overload: Any = torch.ops
    for part in parts:
        overload = getattr(overload, part, None)
    signatures = get_signature_for_torch_op(overload) if callable(overload) else None
    return signatures[0] if signatures else None


def argument_names(name: str) -> tuple[str, ...]:
    """Return the names of an operator's arguments as torch.fx has them (`input` for `self`), () without a schema."""
    signature = _signature(name)
    return tuple(signature.parameters) if signature is not None else ()


def has_items(name: str) -> bool:
    """Tell whether an operator has several results, or a list of them."""
    signature = _signature(name)
    return signature is not None and signature.return_annotation is not torch.Tensor


def arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a call in the order of the schema, with the defaults of those left out."""
    signature = _signature(name)
    if signature is None:
        return (*args, *(kwargs[key] for key in sorted(kwargs)))
    named = {"input" if key == "self" else key: value for key, value in kwargs.items()}
    return tuple(
        args[i] if i < len(args) else named.get(parameter.name, parameter.default)
        for i, parameter in enumerate(signature.parameters.values())
    )


def constant_value(scope: Scope, node: Node) -> torch.Tensor | None:
    """Return the value of a constant with one element, None when it is not known in the graph."""
    if node.op == "get_attr":
        value = graphs.attribute(scope.graph_module, str(node.target))
    else:
        value = getattr(node.meta.get("val"), "constant", None)
    return value if isinstance(value, torch.Tensor) else None


# -- one match ---------------------------------------------------------------------------------------------------------

_Todo = tuple[Any, Any, Any] | None
"""What is still to compare: part of a pattern, node or value, and the rest, as a linked list that choices share."""


class _Graph:
    """A graph, and which of its nodes are taken."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.nodes = list(scope.graph_module.graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.name: dict[Node, str] = {}
        self.by_name: dict[str, list[Node]] = {}
        for node in self.nodes:
            if node.op == "call_function":
                name = self.name[node] = graphs.operator_name(node)
                self.by_name.setdefault(name, []).append(node)
        self.taken: dict[Node, str] = {}
        self.users: dict[Node, dict[str, deque[Node]]] = {}
        self.comparisons = 0

    def ordered(self, nodes: Any) -> tuple[Node, ...]:
        return tuple(sorted(nodes, key=self.place.__getitem__))

    def free_users(self, node: Node, name: str) -> Iterator[Node]:
        """Yield the users of a node with a name that are in no match, in graph order; each is passed by once."""
        if node not in self.users:
            table = self.users[node] = {}
            for user in self.ordered(node.users):
                table.setdefault(self.name.get(user, ""), deque()).append(user)
        waiting = self.users[node].get(name, deque())
        while waiting and waiting[0] in self.taken:
            waiting.popleft()
        yield from (user for user in waiting if user not in self.taken)

    def is_constant(self, value: Any) -> bool:
        return isinstance(value, Node) and (value in self.scope.constants or value.op == "get_attr")


class _Search:
    """The search for one match, from an anchor on, with choices that are taken back."""

    def __init__(self, graph: _Graph, candidate: Candidate) -> None:
        self.graph, self.candidate, self.template = graph, candidate, candidate.template
        self.bound: dict[Operator | Input, Any] = {}
        self.term_of: dict[Node, Operator] = {}
        self.trail: list[Operator | Input] = []
        self.reason = ""
        self.refused: tuple[Node, ...] = ()
        self.left = 1024 + 64 * len(self.template.operators)

    def run(self, anchor: Node) -> tuple[Node, ...] | None:
        """Return the nodes of an accepted match whose last operator is the anchor."""
        start: _Todo = (self.template.operators[-1], anchor, None)
        choices: list[tuple[Iterator[_Todo], int]] = [(iter((start,)), 0)]
        while choices:
            options, mark = choices[-1]
            self._take_back(mark)
            found = list(islice(options, 1))
            if not found:
                choices.pop()
                continue
            nodes = self._follow(found[0], choices)
            if nodes is not None:
                return nodes
            if self.left <= 0:
                self._refuse((anchor,), "there are too many ways to compare it with the graph")
                return None
        return None

    def _follow(self, todo: _Todo, choices: list[tuple[Iterator[_Todo], int]]) -> tuple[Node, ...] | None:
        """Go on until the match is complete or fails; leave the choices that there were."""
        while self.left > 0:
            options = self._users() if todo is None else iter(self._compare(*todo))
            if options is None:
                return self._finished()
            found = list(islice(options, 1))
            if not found:
                return None
            choices.append((options, len(self.trail)))
            todo = found[0]
        return None

    def _take_back(self, mark: int) -> None:
        while len(self.trail) > mark:
            value = self.bound.pop(term := self.trail.pop())
            if isinstance(term, Operator):
                del self.term_of[value]

    def _bind(self, term: Operator | Input, value: Any) -> None:
        self.bound[term] = value
        self.trail.append(term)

    def _refuse(self, nodes: tuple[Node, ...], reason: str) -> None:
        if not self.refused:
            self.reason, self.refused = reason, nodes

    def _compare(self, term: Any, value: Any, rest: _Todo) -> list[_Todo]:
        """Return the ways to go on when a part of the pattern and a node or value fit; none when they do not."""
        self.graph.comparisons += 1
        self.left -= 1
        if isinstance(term, Operator):
            return self._compare_operator(term, value, rest)
        if isinstance(term, Input):
            if term in self.bound:
                return [rest] if _same(self.bound[term], value) else []
            if not self._fits_input(term, value):
                return []
            self._bind(term, value)
            return [rest]
        if isinstance(term, (list, tuple)):
            if not isinstance(value, (list, tuple)) or len(term) != len(value):
                return []
            return [_push(term, value, rest)]
        return [rest] if self._fits_value(term, value) else []

    def _fits_input(self, term: Input, value: Any) -> bool:
        if term.wildcard:
            return True
        return (
            self.graph.is_constant(value)
            if term.constant
            else value is not None and value is not inspect.Parameter.empty
        )

    def _fits_value(self, term: Any, value: Any) -> bool:
        if term is ANY:
            return True
        if isinstance(term, Held):
            known = constant_value(self.graph.scope, value) if self.graph.is_constant(value) else None
            return known is not None and known.dtype == term.value.dtype and torch.equal(known, term.value)
        return not isinstance(value, Node) and bool(term == value)

    def _compare_operator(self, term: Operator, value: Any, rest: _Todo) -> list[_Todo]:
        if term in self.bound:
            return [rest] if self.bound[term] is value else []
        if not self._may_be(term, value):
            return []
        if value in self.graph.taken:
            why = f"node {value.name} is in a match of pattern {self.graph.taken[value]}"
            self._refuse(self.graph.ordered(self.term_of), why)
            return []
        name = self.graph.name[value]
        wanted, got = term.arguments[name], arguments(name, value.args, value.kwargs)
        if len(wanted) != len(got):
            return []
        self._bind(term, value)
        self.term_of[value] = term
        ways = [_push(wanted, got, rest)]
        if name in _COMMUTATIVE and _commutes(got) and not _same(got[0], got[1]):
            swapped = (got[1], got[0], *got[2:])
            likely = [self._heads_fit(wanted, got), self._heads_fit(wanted, swapped)]
            both = [ways[0], _push(wanted, swapped, rest)]
            ways = [way for way, fits in zip(both, likely, strict=True) if fits]
        return ways

    def _may_be(self, term: Operator, value: Any) -> bool:
        return isinstance(value, Node) and value not in self.term_of and self.graph.name.get(value) in term.arguments

    def _heads_fit(self, wanted: Sequence[Any], got: Sequence[Any]) -> bool:
        """Look one level ahead, so that most operands have one order only."""
        for term, value in zip(wanted[:2], got[:2], strict=True):
            if isinstance(term, (Operator, Input)) and term in self.bound:
                fits = _same(self.bound[term], value)
            elif isinstance(term, Operator):
                fits = self._may_be(term, value)
            else:
                fits = self._fits_input(term, value) if isinstance(term, Input) else self._fits_value(term, value)
            if not fits:
                return False
        return True

    def _users(self) -> Iterator[_Todo] | None:
        """Go up from what is bound to an operator that is not; None when all are."""
        missing = [term for term in self.template.operators if term not in self.bound]
        for term in missing:
            for source in term.read():
                node = self.bound.get(source)
                if isinstance(node, Node):
                    return self._users_like(term, node)
        return iter(()) if missing else None

    def _users_like(self, term: Operator, node: Node) -> Iterator[_Todo]:
        for name in term.arguments:
            for user in self.graph.free_users(node, name):
                self.left -= 1
                if user not in self.term_of:
                    yield term, user, None

    def _finished(self) -> tuple[Node, ...] | None:
        """Check a match that is complete, and return its nodes if it holds."""
        results = tuple(self.bound[term] for term in self.template.results)
        following = [u for n in self.term_of for u in n.users if graphs.is_getitem(u) and u not in self.term_of]
        nodes = self.graph.ordered([*self.term_of, *(u for u in following if u.args[0] in results or not u.users)])
        inputs = {term.name: value for term, value in self.bound.items() if isinstance(term, Input)}
        reason = self._escape(nodes, results) or self._inside(nodes, inputs)
        if not reason and len(results) > 1:
            reason = _way_back(nodes, self.graph.place)
        if not reason and not self.candidate.accept(nodes, inputs, results):
            reason = "its check refused it"
        if reason:
            self._refuse(nodes, reason)
            return None
        return nodes

    def _escape(self, nodes: Sequence[Node], results: Sequence[Node]) -> str:
        inside = set(nodes)
        for node in nodes:
            if node in results or (graphs.is_getitem(node) and node.args[0] in results):
                continue
            for user in node.users:
                if user not in inside:
                    return f"{node.name}, which is not among its results, is used outside of it by {user.name}"
        return ""

    def _inside(self, nodes: Sequence[Node], inputs: Mapping[str, Any]) -> str:
        inside = set(nodes)
        for name, value in inputs.items():
            held: list[Node] = []
            torch.fx.node.map_arg((value,), held.append)
            if not inside.isdisjoint(held):
                return f"its input {name} would be {held[0].name}, which is inside of it"
        return ""


def _push(terms: Sequence[Any], values: Sequence[Any], rest: _Todo) -> _Todo:
    for term, value in zip(reversed(terms), reversed(values), strict=True):
        rest = (term, value, rest)
    return rest


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Node) or isinstance(other, Node):
        return one is other
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _commutes(got: Sequence[Any]) -> bool:
    return len(got) == 2 or (not isinstance(got[2], Node) and got[2] == 1)


def _way_back(nodes: Sequence[Node], place: Mapping[Node, int]) -> str:
    """Return the path that leaves some nodes and comes back, in words; "" when there is none."""
    inside, last = set(nodes), place[nodes[-1]]
    parent: dict[Node, Node] = {}
    stack = list(reversed(nodes))
    while stack:
        node = stack.pop()
        for user in node.users:
            if user in inside:
                if node in inside:
                    continue
                path = [user, node]
                while path[-1] not in inside:
                    path.append(parent[path[-1]])
                return f"the path {' -> '.join(n.name for n in reversed(path))} leaves it and comes back"
            if user not in parent and place[user] < last:
                parent[user] = node
                stack.append(user)
    return ""


# -- all matches -------------------------------------------------------------------------------------------------------


def find(scope: Scope, candidates: Sequence[Candidate]) -> Matching:
    """Choose matches that share no node and that can all be contracted at once.

    Higher priority goes first, then more operators, then the match whose last operator comes first in the graph, then
    the order of the candidates.
    """
    graph = _Graph(scope)
    matching = Matching()
    ranked: list[Found] = []
    for _, numbers in sorted(_ranks(candidates).items()):
        for anchor, number in _anchors(graph, candidates, numbers):
            if anchor in graph.taken:
                matching.nearest.setdefault(number, (anchor, f"it is in a match of pattern {graph.taken[anchor]}"))
                continue
            search = _Search(graph, candidates[number])
            nodes = search.run(anchor)
            if nodes is not None:
                ranked.append(Found(number, nodes))
                graph.taken.update(dict.fromkeys(nodes, candidates[number].name))
            else:
                if search.refused:
                    matching.nearest.setdefault(number, (anchor, search.reason))
                for node in search.refused:
                    matching.reasons.setdefault(node, (number, search.reason))
    matching.comparisons = graph.comparisons
    several = [len(candidate.template.results) > 1 for candidate in candidates]
    kept = _acyclic(graph, ranked, several, matching)
    matching.found = _in_order(graph, kept, any(several[found.candidate] for found in kept))
    return matching


def _ranks(candidates: Sequence[Candidate]) -> dict[tuple[int, int], list[int]]:
    ranks: dict[tuple[int, int], list[int]] = {}
    for number, candidate in enumerate(candidates):
        ranks.setdefault((-candidate.priority, -len(candidate.template.operators)), []).append(number)
    return ranks


def _anchors(graph: _Graph, candidates: Sequence[Candidate], numbers: Sequence[int]) -> list[tuple[Node, int]]:
    pairs = [
        (anchor, number)
        for number in numbers
        for name in candidates[number].template.operators[-1].arguments
        for anchor in graph.by_name.get(name, ())
    ]
    return sorted(pairs, key=lambda pair: (graph.place[pair[0]], pair[1]))


def _acyclic(graph: _Graph, ranked: Sequence[Found], several: Sequence[bool], matching: Matching) -> list[Found]:
    """Give up matches that feed each other both ways, the last ones first.

    All values of a match with one result feed that result, so that only matches with `several` can do it.
    """
    kept, turn = list(ranked), 0
    while sum(several[found.candidate] for found in kept) > 1:
        given_up: set[int] = set()
        for component in _cycles(graph, kept):
            inside = [i for i in component if several[kept[i].candidate]]
            count = 1 if turn < _ROUNDS else max(1, len(inside) // 2)
            why = f"it and the match at {kept[inside[0]].nodes[-1].name} would feed each other both ways"
            for i in inside[-count:]:
                given_up.add(i)
                matching.nearest.setdefault(kept[i].candidate, (kept[i].nodes[-1], why))
                matching.reasons.update(dict.fromkeys(kept[i].nodes, (kept[i].candidate, why)))
        if not given_up:
            break
        kept = [found for i, found in enumerate(kept) if i not in given_up]
        turn += 1
    return kept


def _cycles(graph: _Graph, kept: Sequence[Found]) -> list[list[int]]:
    """Return the numbers of the matches on each knot of cycles that contracting all of them would make."""
    knots = [knot for knot in nx.strongly_connected_components(_contracted(graph, kept)) if len(knot) > 1]
    return sorted(sorted(item for item in knot if isinstance(item, int)) for knot in knots)


def _contracted(graph: _Graph, kept: Sequence[Found]) -> Any:
    """Return the graph with each match as one vertex, its number."""
    unit: dict[Node, Any] = {node: i for i, found in enumerate(kept) for node in found.nodes}
    contracted: Any = nx.DiGraph()
    for node in graph.nodes:
        source = unit.get(node, node)
        contracted.add_node(source)
        targets = (unit.get(user, user) for user in node.users)
        contracted.add_edges_from((source, target) for target in targets if target != source)
    return contracted


def _in_order(graph: _Graph, kept: Sequence[Found], several: bool) -> list[Found]:
    """Order matches topologically, by their last nodes where that is free; those with one result are so by these."""
    kept = sorted(kept, key=lambda found: graph.place[found.nodes[-1]])
    if not several:
        return kept

    def place(item: Any) -> int:
        return graph.place[kept[item].nodes[-1] if isinstance(item, int) else item]

    ordered = nx.lexicographical_topological_sort(_contracted(graph, kept), key=place)
    return [kept[item] for item in ordered if isinstance(item, int)]


__all__ = [
    "ANY",
    "GETITEM",
    "Candidate",
    "Found",
    "Held",
    "Input",
    "Matching",
    "Operator",
    "Template",
    "argument_names",
    "arguments",
    "constant_value",
    "find",
    "has_items",
]
