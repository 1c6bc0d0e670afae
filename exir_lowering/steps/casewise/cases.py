"""Cases: calls of an operator that are alike, so that what one of them becomes is what all of them become."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from exir_lowering._upstream.ambient import switches
from exir_lowering._upstream.fakes import FakeTensor
from exir_lowering._upstream.likeness import Likeness
from exir_lowering._upstream.operators import is_built_in
from exir_lowering._upstream.programs import pytree
from exir_lowering.steps.casewise.value_keys import Uncovered, describe_arguments, renew


@dataclass(frozen=True, slots=True)
class Case:
    """A call of an operator, and what its operands are like."""

    key: Hashable  # equal for calls that are alike: operator, arguments, and the types, sizes, strides of the operands
    # whether it means something in one program only: it has symbols, or an operator of users, who may redefine it
    local: bool
    node: Node  # one of the calls
    operands: tuple[Node, ...]  # without repetition
    values: tuple[Any, ...]  # those of the operands
    result: Any  # what the call returns, before its conversion
    overwrites: bool = False  # its first operand, which nothing reads afterwards


class Describer:
    """Describes the calls of one graph; what a node's value is like is described once."""

    def __init__(self, *, constants: bool = False) -> None:
        self._constants = constants
        self._switches = switches()
        self._values: dict[int, tuple[Any, Hashable, bool]] = {}

    def value(self, value: Any) -> Hashable:
        """Describe a value."""
        return self._described(value)[0]

    def _described(self, value: Any) -> tuple[Hashable, bool]:
        known = self._values.get(id(value))
        if known is None or known[0] is not value:
            likeness = Likeness(Uncovered, constants=self._constants)
            known = (value, likeness.describe(value), likeness.symbolic)
            self._values[id(value)] = known
        return known[1], known[2]

    def case(self, node: Node, target: Any, values: Sequence[Any], result: Any, *, overwrites: bool = False) -> Case:
        """Describe a call, whose operator becomes `target`, by the values of its `all_input_nodes`; or Uncovered."""
        operands = tuple(node.all_input_nodes)
        numbers = {operand: index for index, operand in enumerate(operands)}
        arguments = describe_arguments((node.args, node.kwargs), numbers.__getitem__)
        described = [self._described(value) for value in values]
        key = (target, arguments, tuple(entry[0] for entry in described), self._switches)
        local = any(entry[1] for entry in described) or not is_built_in(target)
        return Case(key, local, node, operands, tuple(values), result, overwrites)


def place_side_by_side(cases: Sequence[Case]) -> Graph:
    """Make one graph of cases that have nothing to do with each other; Uncovered if a result's type is unexpected.

    Each case has inputs and outputs of its own, in the order of the cases. Sizes with symbols are common to all.
    """
    graph = Graph()
    rows: list[list[Node | None]] = [
        [_placeholder(graph, f"case{number}_{index}", value) for index, value in enumerate(case.values)]
        for number, case in enumerate(cases)
    ]
    sizes = _add_sizes(graph, cases)
    outputs: list[Node] = []
    for number, (case, row) in enumerate(zip(cases, rows, strict=True)):
        env = {
            operand: placeholder if placeholder is not None else sizes[value.node.expr]
            for operand, placeholder, value in zip(case.operands, row, case.values, strict=True)
        }
        if case.overwrites:  # it is no input of the program that the case is from
            written: Any = case.node.args[0]
            before = env[written]
            env[written] = graph.call_function(torch.ops.aten.clone.default, (before,))
            _describe(env[written], before.meta["val"], number)
        args, kwargs = map_arg((case.node.args, dict(case.node.kwargs)), env.__getitem__)
        call = graph.create_node("call_function", case.node.target, tuple(args), dict(kwargs))
        _describe(call, case.result, number)
        outputs += _tensors(graph, call, number)
    graph.output(tuple(outputs)).meta["val"] = tuple(node.meta["val"] for node in outputs)
    return graph


def _add_sizes(graph: Graph, cases: Sequence[Case]) -> dict[Any, Node]:
    """Add an input that has the symbolic sizes among the operands, and a node for each; Uncovered without a tensor."""
    values = [value for case in cases for value in case.values]
    sizes = {value.node.expr: value for value in values if isinstance(value, torch.SymInt)}
    if not sizes:
        return {}
    tensors = (*values, *pytree.tree_leaves([case.result for case in cases]))
    mode = next((value.fake_mode for value in tensors if isinstance(value, FakeTensor)), None)
    if mode is None:
        raise Uncovered("sizes that no tensor has")
    carrier = graph.placeholder("sizes")
    with mode:
        carrier.meta["val"] = torch.empty(tuple(sizes.values()))
    nodes = {}
    for index, (expression, size) in enumerate(sizes.items()):
        nodes[expression] = graph.call_function(torch.ops.aten.sym_size.int, (carrier, index))
        _describe(nodes[expression], size, 0)
    return nodes


def _placeholder(graph: Graph, name: str, value: Any) -> Node | None:
    if isinstance(value, torch.SymInt):
        return None
    if not isinstance(value, torch.Tensor):
        raise Uncovered(f"an operand of type {type(value).__name__}")
    node = graph.placeholder(name)
    node.meta["val"] = renew(value, None)
    return node


def _describe(node: Node, value: Any, number: int) -> None:
    """Give a call what torch requires of the metadata of nodes, and the number of its case."""
    node.meta["val"] = value
    node.meta["nn_module_stack"] = {"": ("", "torch.nn.Module")}
    node.meta["stack_trace"] = f'File "case", line {number + 1}, in forward\n'
    node.meta["torch_fn"] = ("case", "case")


def list_results(result: Any) -> list[Any]:
    """Return the tensors that a call returns: its result, or each element of it that is not None."""
    elements = result if isinstance(result, (list, tuple)) else [result]
    return [element for element in elements if element is not None]


def _tensors(graph: Graph, call: Node, number: int) -> Iterator[Node]:
    """Yield the nodes of the tensors that a call returns: itself, or one that takes each element of its result."""
    value = call.meta["val"]
    if value is None:
        return
    if not isinstance(value, (list, tuple)):
        yield call
        return
    for index, element in enumerate(value):
        if element is None:
            continue
        if not isinstance(element, torch.Tensor):
            raise Uncovered(f"{call.target} returns a {type(element).__name__}")
        item = graph.call_function(operator.getitem, (call, index))
        _describe(item, element, number)
        yield item
