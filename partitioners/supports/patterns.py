"""Patterns, and the support of what matches them: which matches win, and which would form a cycle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import GraphModule, Node

from exir_lowering import InputError, PartitionerContractError, graphs
from exir_lowering.graphs import quotient
from exir_lowering.graphs.order import topological
from exir_lowering.partitioners.supports.matching import Search, SearchedGraph
from exir_lowering.partitioners.supports.support import Check, GraphScope, No, Support, describe_node
from exir_lowering.partitioners.supports.templates import read_template
from exir_lowering.plugins import asking

_Found = tuple[int, tuple[Node, ...]]  # A match: the number of the pattern, and the nodes in graph order


@dataclass(slots=True)
class Matching:
    """The matches of one graph, by positions of nodes: nodes that are remembered would keep their graph alive."""

    # The numbers of the patterns that were chosen and their nodes, in topological order, by their last nodes where it
    # is free.
    found: tuple[tuple[int, tuple[int, ...]], ...]
    # For nodes that were nearly in a match, the pattern's number and why not.
    reasons: dict[int, tuple[int, str]]
    # For patterns without a match, the first node that nearly matched, by its name, and why it did not.
    nearest: dict[int, tuple[str, str]]
    comparisons: int  # how many times a part of a pattern was compared with a node or value


def find(scope: GraphScope, patterns: Sequence[Pattern]) -> Matching:
    """Choose matches that share no node and can all be contracted: by priority, size, last operator, then number."""
    graph = SearchedGraph(scope)
    tries = sorted(
        (-pattern.priority, -len(pattern.template.operators), graph.position[anchor], number)
        for number, pattern in enumerate(patterns)
        for name in pattern.template.operators[-1].arguments
        for anchor in graph.by_name.get(name, ())
    )
    ranked: list[_Found] = []
    for *_, position, number in tries:
        pattern, anchor = patterns[number], graph.nodes[position]
        if anchor in graph.taken:
            graph.nearest.setdefault(number, (anchor, f"it is in a match of pattern {graph.taken[anchor]}"))
            continue
        search = Search(graph, pattern.template, partial(_accept, pattern, scope))
        nodes = search.run(anchor)
        if nodes is not None:
            ranked.append((number, nodes))
            graph.taken.update(dict.fromkeys(nodes, pattern.name))
            continue
        if search.refused:
            graph.nearest.setdefault(number, (anchor, search.reason))
        for node in search.refused:
            graph.reasons.setdefault(node, (number, search.reason))
    several = frozenset(number for number, pattern in enumerate(patterns) if len(pattern.template.results) > 1)
    return Matching(
        tuple(
            (number, tuple(map(graph.position.__getitem__, nodes))) for number, nodes in _sort(graph, ranked, several)
        ),
        {graph.position[node]: reason for node, reason in graph.reasons.items()},
        {number: (graphs.qualified_name(scope.path, node), text) for number, (node, text) in graph.nearest.items()},
        graph.comparisons,
    )


def _sort(graph: SearchedGraph, ranked: Sequence[_Found], several: frozenset[int]) -> list[_Found]:
    """Order matches topologically, by their last nodes where the order is free.

    For matches with single results, these suffice. Those with several results may feed each other both ways: then the
    later half of these is given up, again and again.
    """
    kept = list(ranked)
    while not several.isdisjoint(number for number, _ in kept):
        match_of = {node: i for i, (_, nodes) in enumerate(kept) for node in nodes}
        last = {**graph.position, **{node: graph.position[nodes[-1]] for _, nodes in kept for node in nodes}}
        by_last = sorted(graph.nodes, key=last.__getitem__)
        vertices, successors = quotient.contract(by_last, lambda node, of=match_of: of.get(node, node))  # type: ignore[misc]
        given_up: set[int] = set()
        for knot in quotient.find_knots(successors):
            matches = sorted(match_of[vertices[i][0]] for i in knot if vertices[i][0] in match_of)
            inside = [i for i in matches if kept[i][0] in several]
            why = f"it and the match at {kept[inside[0]][1][-1].name} would feed each other both ways"
            for i in inside[-max(1, len(inside) // 2) :]:
                given_up.add(i)
                number, nodes = kept[i]
                graph.nearest.setdefault(number, (nodes[-1], why))
                graph.reasons.update(dict.fromkeys(nodes, (number, why)))
        if not given_up:
            return [kept[match_of[vertices[i][0]]] for i in topological(successors) if vertices[i][0] in match_of]
        kept = [found for i, found in enumerate(kept) if i not in given_up]
    return sorted(kept, key=lambda found: graph.position[found[1][-1]])


@dataclass(frozen=True)
class Match:
    """Where a pattern was found, for its `check`.

    Attributes:
        pattern: The pattern.
        nodes: The nodes, in graph order.
        inputs: For each parameter of the pattern, the node or value that it stands for.
        outputs: The nodes whose values are the pattern's results.
    """

    pattern: Pattern
    nodes: tuple[Node, ...]
    inputs: Mapping[str, Any]
    outputs: tuple[Node, ...]


class Pattern:
    """A small graph of operators, written as a function.

    Without example inputs the function calls operators (`torch.ops.aten.mul.Tensor(x, y)`), may pass `ANY` as an
    argument, and may call `one_of(...)`. With them it is any function of tensors that torch.export takes; it is
    decomposed as a program is, its sizes from the examples match any sizes, and other numbers must be equal.

    A parameter matches any node or value, but not an omitted argument; one that is annotated `Constant` only matches
    parameters, buffers and constants; one whose default is `ANY` matches anything. A parameter with another default has
    that value.

    Attributes:
        name: Its name in messages.
        priority: Patterns of higher priority choose first.
        operators: The names that each of its operators may have.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        example_inputs: Sequence[torch.Tensor] | None = None,
        *,
        name: str = "",
        priority: int = 0,
        check: Callable[[Match], bool] | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """Read the function.

        Args:
            function: The function.
            example_inputs: A tensor for each parameter, to write the pattern in any PyTorch.
            name: The pattern's name; by default the function's.
            priority: Patterns of higher priority choose first; among equal ones, those with more operators do.
            check: Returns whether to take a `Match`.
            attributes: What arguments of its operators may be, instead of what the function gives them, by name such as
                "stride", or "aten.convolution.stride" for one operator: a value, a set of values, a function from a
                value to a bool, or `ANY`, with which an argument may also be a node or omitted. A number stands for
                lists of it.

        Raises:
            InputError: The function is not a pattern; the message says what to change.
        """
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.priority, self.check = priority, check
        self.template = read_template(self.name, function, example_inputs, attributes or {})
        self.operators = tuple(tuple(term.arguments) for term in self.template.operators)

    def __repr__(self) -> str:
        return f"Pattern({self.name})"


class PatternSupport(Support):
    """Support the nodes of matches; the nodes of each match stay together.

    Patterns of higher priority choose first, then those with more operators, then the match that ends first in the
    graph. A node is in at most one match.
    """

    def __init__(self, *patterns: Pattern) -> None:
        """Take patterns; InputError if there is none, or an argument is not a pattern."""
        for pattern in patterns:
            if not isinstance(pattern, Pattern):
                raise InputError(f"A Pattern was expected, got {pattern!r}. Wrap a function: Pattern(function).")
        if not patterns:
            raise InputError("No pattern was given. Give at least one Pattern.")
        self.patterns = patterns
        self._remembered: WeakKeyDictionary[GraphModule, tuple[Any, Matching]] = WeakKeyDictionary()

    def bind(self, scope: GraphScope) -> Check:
        """Find the matches of a graph."""
        nodes, found = list(scope.graph_module.graph.nodes), self._matching(scope)
        taken = {nodes[i] for _, positions in found.found for i in positions}
        why = {
            nodes[i]: f"pattern {self.patterns[n].name} did not match: {text}" for i, (n, text) in found.reasons.items()
        }
        by = str(self)
        other = f"it is in no match of {', '.join(pattern.name for pattern in self.patterns)}"
        return lambda node: None if node in taken else No("pattern", why.get(node, other), by)

    def groups(self, scope: GraphScope) -> Sequence[Sequence[Node]]:
        """Return the nodes of each match, in topological order."""
        nodes = list(scope.graph_module.graph.nodes)
        return [[nodes[i] for i in positions] for _, positions in self._matching(scope).found]

    def matched(self, scope: GraphScope) -> frozenset[int]:
        """Return the numbers of the patterns that have a match in a graph."""
        return frozenset(number for number, _ in self._matching(scope).found)

    def nearest(self, scope: GraphScope) -> Mapping[int, tuple[str, str]]:
        """Return, by pattern number, a node where the pattern nearly matched, and what was missing."""
        return self._matching(scope).nearest

    def __str__(self) -> str:
        return f"PatternSupport({', '.join(pattern.name for pattern in self.patterns)})"

    def _matching(self, scope: GraphScope) -> Matching:
        nodes = scope.graph_module.graph.nodes  # what matching depends on, without keeping nodes
        fingerprint = tuple((n.name, n.op, n.target, str(n.args), str(n.kwargs), n in scope.constants) for n in nodes)
        known = self._remembered.get(scope.graph_module)
        if known is None or known[0] != fingerprint:
            matching = find(scope, self.patterns)
            known = self._remembered[scope.graph_module] = (fingerprint, matching)
        return known[1]


def _accept(
    pattern: Pattern, scope: GraphScope, nodes: tuple[Node, ...], inputs: Mapping[str, Any], results: tuple[Node, ...]
) -> bool:
    """Ask a pattern's check whether to take a match."""
    if (check := pattern.check) is None:
        return True
    match, name = Match(pattern, nodes, inputs, results), f"The check of pattern {pattern.name}"
    try:
        return bool(asking.guarded(results[-1], None, name, lambda: bool(check(match))))
    except (PartitionerContractError, MemoryError):
        raise
    except Exception as error:
        raise PartitionerContractError(
            f"The check of pattern {pattern.name} raised {type(error).__name__} for the match at "
            f"{describe_node(results[-1], scope)}: {error}",
            violation="raised",
            details={"pattern": pattern.name, "node": graphs.qualified_name(scope.path, results[-1])},
        ) from error
