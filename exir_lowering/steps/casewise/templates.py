"""Templates: what the calls of a case become, taken from a converted graph of cases side by side."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from exir_lowering._upstream.conversion import SYMBOLIC_OPERATORS
from exir_lowering._upstream.likeness import Likeness
from exir_lowering._upstream.operators import packet_name
from exir_lowering.steps.casewise.cases import Case
from exir_lowering.steps.casewise.value_keys import Uncovered, describe_arguments, outlast

_FROM_TRACING = ("original_aten", "custom")  # the metadata that tracing itself gives to nodes


@dataclass(frozen=True, slots=True)
class Place:
    """A reference in a template: to an operand of the call (-1 is the first one), or to a node of it (from 0)."""

    number: int


@dataclass(frozen=True, slots=True)
class Size:
    """A reference in a template to a symbolic size, which a node of the program around it computes."""

    expression: Any


Reference = Place | Size


@dataclass(frozen=True, slots=True)
class TemplateNode:
    """A node of a template."""

    target: Any  # None for a constant
    name: str | None  # what its name is made from; None for the operator's
    args: Any  # with places for nodes
    kwargs: Any  # likewise
    value: Any  # what it returns, as a prototype: to be renewed for each node
    constant: torch.Tensor | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)  # what tracing says about it besides


@dataclass(frozen=True, slots=True)
class Template:
    """What the calls of a case become."""

    nodes: tuple[TemplateNode, ...]  # in order
    # their places: one, or, for a call that returns a list, one per element (None for None)
    results: Reference | tuple[Reference | None, ...]
    values: Any  # those of the results, as prototypes
    sizes: frozenset[Any] = frozenset()  # the symbolic sizes that it takes
    computed: frozenset[Any] = frozenset()  # the symbolic sizes that it computes
    written: frozenset[int] = frozenset()  # the elements of the result that tracing the call writes in place

    def views(self, operand: int) -> bool:
        """Return whether it takes a view of an operand."""
        return any(getattr(node.target, "is_view", False) and Place(-1 - operand) in node.args for node in self.nodes)

    def only_replaces(self, case: Case, target: Any) -> bool:
        """Return whether a call becomes a call of one operator with the same arguments, and takes of its elements."""
        # ExecuTorch redefines the operators that it does not decompose: by name, they are the same.
        if not self.nodes or str(self.nodes[0].target) != str(target):
            return False
        elements = self.nodes[1:]
        if any(each.target is not operator.getitem or each.args[0] != Place(0) for each in elements):
            return False
        taken = tuple(Place(index + 1) for index in range(len(elements))) if elements else Place(0)
        found = tuple(filter(None, self.results)) if isinstance(self.results, tuple) else self.results
        sizes = {v.node.expr: n for n, v in zip(case.operands, case.values, strict=True) if isinstance(v, torch.SymInt)}
        if found != taken or not self.sizes.issubset(sizes):
            return False
        first = self.nodes[0]
        arguments = fill((first.args, first.kwargs), (), case.operands, sizes)
        given = (case.node.args, dict(case.node.kwargs))
        number = {operand: index for index, operand in enumerate(case.operands)}.__getitem__
        return describe_arguments(arguments, number) == describe_arguments(given, number)

    def outlasting(self) -> Template:
        """Return the template without what keeps its program alive; raise Uncovered if its values depend on data."""
        nodes = tuple(replace(node, value=outlast(node.value)) for node in self.nodes)
        return replace(self, nodes=nodes, values=outlast(self.values))


def take_templates(
    cases: Sequence[Case],
    converted: GraphModule,
    inputs: Sequence[Sequence[Node | None]],
    results: Sequence[Sequence[Any]],
    *,
    alone: bool = False,
) -> list[Template]:
    """Take each case's template from their converted graph, by its placeholders (None for sizes) and tensor outputs.

    Sizes belong to no case, but to one that is `alone`. Uncovered if anything else belongs to no case, or to two.
    """
    owner: dict[Node, int] = {}
    for number, row in enumerate(inputs):
        owner.update(dict.fromkeys(filter(None, row), number))
    members: list[list[Node]] = [[] for _ in cases]
    copies = [_find_copy(case, row) for case, row in zip(cases, inputs, strict=True)]
    sizes = {
        node: Size(node.meta["val"].node.expr)
        for node in converted.graph.nodes
        if _is_size(node) and not (alone and node.target in SYMBOLIC_OPERATORS)
    }
    for node in converted.graph.nodes:
        if node in sizes:
            continue
        owners = {owner[operand] for operand in node.all_input_nodes if operand in owner}
        if node.op == "output" or not owners:
            continue
        if len(owners) != 1:
            raise Uncovered(f"{node.target} belongs to {len(owners)} calls")
        owner[node] = owners.pop()
    _own_sources(converted.graph, results, owner)
    for node in converted.graph.nodes:
        if node.op not in ("placeholder", "output") and node not in sizes:
            if node not in owner:
                raise Uncovered(f"{node.target} belongs to no call")
            members[owner[node]].append(node)
    return [
        _template(case, converted, members[number], inputs[number], results[number], copies[number], sizes)
        for number, case in enumerate(cases)
    ]


def _is_size(node: Node) -> bool:
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt)


def _find_copy(case: Case, inputs: Sequence[Node | None]) -> Node | None:
    """Return the copy of its first operand that a case overwrites; Uncovered if something else was made of it."""
    if not case.overwrites:
        return None
    index = case.operands.index(case.node.args[0])
    users: list[Node] = list(inputs[index].users)  # type: ignore[union-attr]
    if len(users) != 1 or users[0].target is not torch.ops.aten.clone.default:
        raise Uncovered(f"{case.node.target}, whose operand is read in another way")
    copied, written = map(Likeness(Uncovered).describe, (users[0].meta["val"], case.values[index]))
    if copied != written:
        raise Uncovered(f"{case.node.target} on an operand that is not dense")
    return users[0]


def _own_sources(graph: Graph, results: Sequence[Sequence[Any]], owner: dict[Node, int]) -> None:
    """Find whose the nodes without operands are, such as constants and `full`: whose result or operand they are."""
    for number, row in enumerate(results):
        for result in row:
            owner.setdefault(result, number)
    for node in reversed(graph.nodes):
        if node in owner or node.op in ("placeholder", "output"):
            continue
        owners = {owner[user] for user in node.users if user in owner}
        if len(owners) == 1:
            owner[node] = owners.pop()


def _template(
    case: Case,
    converted: GraphModule,
    members: Sequence[Node],
    inputs: Sequence[Node | None],
    results: Sequence[Any],
    copied: Node | None,
    sizes: Mapping[Node, Size],
) -> Template:
    places: dict[Node, Reference] = {node: Place(-1 - i) for i, node in enumerate(inputs) if node is not None}
    places.update(sizes)
    taken = frozenset(sizes[operand].expression for n in members for operand in n.all_input_nodes if operand in sizes)
    nodes = []
    for node in members:
        if node is copied:
            places[node] = places[node.args[0]]  # type: ignore[index]
            continue
        nodes.append(_template_node(node, converted, places))
        places[node] = Place(len(nodes) - 1)
    computed = frozenset(node.value.node.expr for node in nodes if isinstance(node.value, torch.SymInt))
    found = [places[result] for result in results]
    values = [result.meta["val"] for result in results]
    returned: Any = found[0] if found else ()
    value: Any = values[0] if values else None
    if isinstance(case.result, (list, tuple)):
        place_of, value_of = iter(found), iter(values)
        returned = tuple(None if element is None else next(place_of) for element in case.result)
        value = type(case.result)(None if element is None else next(value_of) for element in case.result)
    Likeness(Uncovered).describe(value)  # what has more to it is not covered
    return Template(tuple(nodes), returned, value, taken, computed)


def _template_node(node: Node, converted: GraphModule, places: Mapping[Node, Reference]) -> TemplateNode:
    if node.op == "get_attr":
        constant = getattr(converted, str(node.target), None)
        if not isinstance(constant, torch.Tensor):
            raise Uncovered(f"{node.target} is no tensor")
        return TemplateNode(None, None, (), {}, node.meta.get("val"), constant)
    if node.op != "call_function":
        raise Uncovered(f"a node of kind {node.op}")
    place_of: Any = places.__getitem__
    return TemplateNode(
        node.target,
        packet_name(node.target),
        *map_arg((node.args, node.kwargs), place_of),
        node.meta.get("val"),
        meta={name: node.meta[name] for name in _FROM_TRACING if name in node.meta},
    )


def fill(value: Any, nodes: Sequence[Node], operands: Sequence[Node], sizes: Mapping[Any, Node]) -> Any:
    """Replace the references in arguments by nodes: of the template so far, of the call's operands, and of sizes."""

    def find(reference: Any) -> Any:
        if type(reference) is Place:
            return nodes[reference.number] if reference.number >= 0 else operands[-1 - reference.number]
        return sizes[reference.expression] if type(reference) is Size else reference

    return map_aggregate(value, find)
