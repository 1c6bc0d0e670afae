"""Templates: what equal calls become, as graphs that are taken from a converted graph of calls side by side."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from executorch.exir.pass_base import _TORCH_SYM_OPS
from torch.fx import Graph, GraphModule, Node

from exir_lowering._upstream.value_keys import KeyMaker, NotCoveredError, arguments_key, renew, without_program
from exir_lowering.fast.calls import DistinctCall

FROM_TRACING = ("original_aten", "custom")  # the metadata that tracing itself gives to nodes
SYMBOLIC_OPERATORS = frozenset(
    {*_TORCH_SYM_OPS, *(each for each in vars(operator).values() if callable(each) and not isinstance(each, type))}
)
"""The functions, not operators of torch, that compute sizes in graphs."""


@dataclass(frozen=True, slots=True)
class Template:
    """What equal calls become: a graph, whose nodes have prototypes of their values, to be renewed."""

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

    def only_replaces(self, call: DistinctCall, target: Any) -> bool:
        """Return whether a call becomes a call of one operator with the same arguments, and takes of its elements."""
        # ExecuTorch redefines the operators that it does not decompose: by name, they are the same.
        if not self.nodes or str(self.nodes[0].target) != str(target):
            return False
        first, *elements = self.nodes
        if any(each.target is not operator.getitem or each.args[0] is not first for each in elements):
            return False
        found = tuple(filter(None, self.results)) if isinstance(self.results, tuple) else self.results
        sizes = {v.node.expr: n for n, v in zip(call.operands, call.values, strict=True) if isinstance(v, torch.SymInt)}
        if found != (tuple(elements) or first) or not self.sizes.keys() <= sizes.keys():
            return False
        number = {operand: index for index, operand in enumerate(call.operands)}
        own = {place: number[sizes[size]] for size, place in self.sizes.items()}
        own |= {place: index for index, place in enumerate(self.operands)}
        given = arguments_key((call.node.args, dict(call.node.kwargs)), number.__getitem__)
        return arguments_key((first.args, first.kwargs), own.__getitem__) == given

    def without_program(self) -> Template:
        """Return the template without what keeps its program alive; NotCoveredError if its values depend on data."""
        for node in self.nodes:
            node.meta["val"] = without_program(node.meta.get("val"))
        return replace(self, values=without_program(self.values))


def take_templates(calls: Sequence[DistinctCall], converted: GraphModule, *, alone: bool = False) -> list[Template]:
    """Take each call's template from their converted graph, which has inputs and outputs as `place_side_by_side`.

    Sizes belong to no call, but to one that is `alone`. NotCoveredError if anything else belongs to no call, or to two.
    """
    graph = converted.graph
    # Each call's placeholders (None for sizes) and the tensors that it returns; sizes of all calls have one input.
    placeholders = iter(graph.find_nodes(op="placeholder"))
    returned: Any = iter(graph.output_node().args[0])  # type: ignore[arg-type]
    are_sizes = [[isinstance(value, torch.SymInt) for value in call.values] for call in calls]
    if len(graph.find_nodes(op="placeholder")) != sum(row.count(False) for row in are_sizes) + any(map(any, are_sizes)):
        raise NotCoveredError("a constant that tracing adds")
    inputs = [[None if is_size else next(placeholders) for is_size in row] for row in are_sizes]
    results = []
    for call in calls:
        elements = call.result if isinstance(call.result, (list, tuple)) else [call.result]
        results.append([next(returned) for element in elements if element is not None])
    copies = [_find_copy(call, row) for call, row in zip(calls, inputs, strict=True)]
    sizes = {
        node: node.meta["val"].node.expr
        for node in graph.nodes
        if _is_size(node) and not (alone and node.target in SYMBOLIC_OPERATORS)
    }
    owner: dict[Node, int] = {}
    for number, row in enumerate(inputs):
        owner.update(dict.fromkeys(filter(None, row), number))
    body = [node for node in graph.nodes if node.op not in ("placeholder", "output") and node not in sizes]
    for node in body:
        owners = {owner[operand] for operand in node.all_input_nodes if operand in owner}
        if len(owners) > 1:
            raise NotCoveredError(f"{node.target} belongs to {len(owners)} calls")
        owner.update(dict.fromkeys([node], owners.pop()) if owners else {})
    # Nodes without operands, such as constants and `full`, belong to the call whose result or operand they are.
    for number, row in enumerate(results):
        for result in row:
            owner.setdefault(result, number)
    for node in reversed(graph.nodes):
        users = {owner[user] for user in node.users if user in owner}
        if node not in owner and node.op not in ("placeholder", "output") and len(users) == 1:
            owner[node] = users.pop()
    members: list[list[Node]] = [[] for _ in calls]
    for node in body:
        if node not in owner:
            raise NotCoveredError(f"{node.target} belongs to no call")
        members[owner[node]].append(node)
    return [
        _template(call, converted, members[number], inputs[number], results[number], copies[number], sizes)
        for number, call in enumerate(calls)
    ]


def _is_size(node: Node) -> bool:
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt)


def _find_copy(call: DistinctCall, inputs: Sequence[Node | None]) -> Node | None:
    """Return the copy of its first operand that a call overwrites; NotCoveredError if something else was made of it."""
    if not call.overwrites:
        return None
    index = call.operands.index(call.node.args[0])
    users: list[Node] = list(inputs[index].users)  # type: ignore[union-attr]
    if not users:  # it is written over without being read
        return None
    if len(users) != 1 or users[0].target is not torch.ops.aten.clone.default:
        raise NotCoveredError(f"{call.node.target}, whose operand is read in another way")
    copied, written = map(KeyMaker().key, (users[0].meta["val"], renew(call.values[index], None, gradients=False)))
    if copied != written:
        raise NotCoveredError(f"{call.node.target} on an operand that is not dense")
    return users[0]


def _template(
    call: DistinctCall,
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
            raise NotCoveredError(f"a node of kind {node.op}")
        env[node] = made = graph.node_copy(node, env.__getitem__)
        made.meta = {name: node.meta[name] for name in ("val", *FROM_TRACING) if name in node.meta}
        if node.op == "get_attr":
            constant = getattr(converted, str(node.target), None)
            if not isinstance(constant, torch.Tensor):
                raise NotCoveredError(f"{node.target} is no tensor")
            constants[made] = constant
    nodes = tuple(node for node in graph.nodes if node.op != "placeholder")
    computed = frozenset(node.meta["val"].node.expr for node in nodes if _is_size(node))
    found = [env[result] for result in results]
    values = [result.meta["val"] for result in results]
    returned: Any = found[0] if found else ()
    value: Any = values[0] if values else None
    if isinstance(call.result, (list, tuple)):
        node_of, value_of = iter(found), iter(values)
        returned = tuple(None if element is None else next(node_of) for element in call.result)
        value = type(call.result)(None if element is None else next(value_of) for element in call.result)
    KeyMaker().key(value)  # what has more to it is not covered
    return Template(nodes, constants, operands, taken, returned, value, computed)
