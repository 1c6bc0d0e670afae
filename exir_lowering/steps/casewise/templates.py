"""Templates: what the calls of a case become, as graphs that are taken from a converted graph of cases side by side."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from exir_lowering._upstream.conversion import SYMBOLIC_OPERATORS
from exir_lowering._upstream.likeness import Likeness
from exir_lowering.steps.casewise.cases import Case, list_results
from exir_lowering.steps.casewise.value_keys import Uncovered, describe_arguments, outlast

FROM_TRACING = ("original_aten", "custom")  # the metadata that tracing itself gives to nodes


@dataclass(frozen=True, slots=True)
class Template:
    """What the calls of a case become: a graph, whose nodes have prototypes of their values, to be renewed."""

    nodes: tuple[Node, ...]  # its operators and constants, in order
    constants: Mapping[Node, torch.Tensor]
    operands: tuple[Node, ...]  # its placeholders for the operands of the call
    sizes: Mapping[Any, Node]  # its placeholders for the symbolic sizes that it takes, which others compute
    # what it returns: one node, or, for a call that returns a list, one per element (None for None)
    results: Node | tuple[Node | None, ...]
    values: Any  # those of the results, as prototypes
    computed: frozenset[Any]  # the symbolic sizes that it computes
    written: frozenset[int] = frozenset()  # the elements of the result that tracing the call writes in place

    def views(self, operand: int) -> bool:
        """Return whether it takes a view of an operand."""
        return any(
            getattr(user.target, "is_view", False) and self.operands[operand] in user.args for user in self.nodes
        )

    def only_replaces(self, case: Case, target: Any) -> bool:
        """Return whether a call becomes a call of one operator with the same arguments, and takes of its elements."""
        # ExecuTorch redefines the operators that it does not decompose: by name, they are the same.
        if not self.nodes or str(self.nodes[0].target) != str(target):
            return False
        first, *elements = self.nodes
        if any(each.target is not operator.getitem or each.args[0] is not first for each in elements):
            return False
        found = tuple(filter(None, self.results)) if isinstance(self.results, tuple) else self.results
        sizes = {v.node.expr: n for n, v in zip(case.operands, case.values, strict=True) if isinstance(v, torch.SymInt)}
        if found != (tuple(elements) or first) or not self.sizes.keys() <= sizes.keys():
            return False
        number = {operand: index for index, operand in enumerate(case.operands)}
        own = {place: number[sizes[size]] for size, place in self.sizes.items()}
        own |= {place: index for index, place in enumerate(self.operands)}
        given = describe_arguments((case.node.args, dict(case.node.kwargs)), number.__getitem__)
        return describe_arguments((first.args, first.kwargs), own.__getitem__) == given

    def outlasting(self) -> Template:
        """Return the template without what keeps its program alive; raise Uncovered if its values depend on data."""
        for node in self.nodes:
            node.meta["val"] = outlast(node.meta.get("val"))
        return replace(self, values=outlast(self.values))


def take_templates(cases: Sequence[Case], converted: GraphModule, *, alone: bool = False) -> list[Template]:
    """Take each case's template from their converted graph, which has inputs and outputs as `place_side_by_side`.

    Sizes belong to no case, but to one that is `alone`. Uncovered if anything else belongs to no case, or to two.
    """
    inputs, results = _split(cases, converted.graph)
    owner: dict[Node, int] = {}
    for number, row in enumerate(inputs):
        owner.update(dict.fromkeys(filter(None, row), number))
    members: list[list[Node]] = [[] for _ in cases]
    copies = [_find_copy(case, row) for case, row in zip(cases, inputs, strict=True)]
    sizes = {
        node: node.meta["val"].node.expr
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


def _split(cases: Sequence[Case], converted: Graph) -> tuple[list[list[Node | None]], list[list[Any]]]:
    """Return each case's placeholders (None for sizes) and tensor outputs; Uncovered if there are other inputs."""
    sizes = [[isinstance(value, torch.SymInt) for value in case.values] for case in cases]
    placeholders = converted.find_nodes(op="placeholder")
    if len(placeholders) != sum(row.count(False) for row in sizes) + any(map(any, sizes)):
        raise Uncovered("a constant that tracing adds")
    remaining, returned = iter(placeholders), iter(converted.output_node().args[0])  # type: ignore[arg-type]
    inputs = [[None if is_size else next(remaining) for is_size in row] for row in sizes]
    return inputs, [[next(returned) for _ in list_results(case.result)] for case in cases]


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
    sizes: Mapping[Node, Any],
) -> Template:
    graph, taken, constants = Graph(), dict[Any, Node](), dict[Node, torch.Tensor]()
    operands = tuple(graph.placeholder("operand") for _ in inputs)
    env: dict[Node, Node] = {node: operand for node, operand in zip(inputs, operands, strict=True) if node is not None}
    for read in (each for node in members for each in node.all_input_nodes if each in sizes):
        if sizes[read] not in taken:
            taken[sizes[read]] = graph.placeholder("size")
        env[read] = taken[sizes[read]]
    for node in members:
        if node is copied:
            env[node] = env[node.args[0]]  # type: ignore[index]
            continue
        if node.op not in ("call_function", "get_attr"):
            raise Uncovered(f"a node of kind {node.op}")
        env[node] = made = graph.node_copy(node, env.__getitem__)
        made.meta = {name: node.meta[name] for name in ("val", *FROM_TRACING) if name in node.meta}
        if node.op == "get_attr":
            constant = getattr(converted, str(node.target), None)
            if not isinstance(constant, torch.Tensor):
                raise Uncovered(f"{node.target} is no tensor")
            constants[made] = constant
    nodes = tuple(node for node in graph.nodes if node.op != "placeholder")
    computed = frozenset(node.meta["val"].node.expr for node in nodes if _is_size(node))
    found = [env[result] for result in results]
    values = [result.meta["val"] for result in results]
    returned: Any = found[0] if found else ()
    value: Any = values[0] if values else None
    if isinstance(case.result, (list, tuple)):
        node_of, value_of = iter(found), iter(values)
        returned = tuple(None if element is None else next(node_of) for element in case.result)
        value = type(case.result)(None if element is None else next(value_of) for element in case.result)
    Likeness(Uncovered).describe(value)  # what has more to it is not covered
    return Template(nodes, constants, operands, taken, returned, value, computed)
