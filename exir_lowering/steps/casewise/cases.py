"""Cases: calls of an operator that are alike, so that what one of them becomes is what all of them become."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from exir_lowering.steps.casewise.values import Description, Uncovered, renew


@dataclass(frozen=True, slots=True)
class Case:
    """A call of an operator, and what its operands are like.

    Attributes:
        key: Equal for calls that are alike: operator, arguments, and the types, sizes, strides of the operands.
        symbolic: Whether the key has symbols, which mean something in one program only.
        node: One of the calls.
        operands: The nodes that it takes, without repetition.
        values: Their values, in the same order.
        result: What the call returns, before its conversion.
        overwrites: Whether the call overwrites its first operand, which nothing reads afterwards.
    """

    key: Hashable
    symbolic: bool
    node: Node
    operands: tuple[Node, ...]
    values: tuple[Any, ...]
    result: Any
    overwrites: bool = False


class Describer:
    """Describes the calls of one graph; what a node's value is like is described once."""

    def __init__(self, *, constants: bool = False) -> None:
        self._constants = constants
        self._values: dict[int, tuple[Any, Hashable, bool]] = {}

    def value(self, value: Any) -> Hashable:
        """Describe a value."""
        return self._described(value)[0]

    def _described(self, value: Any) -> tuple[Hashable, bool]:
        known = self._values.get(id(value))
        if known is None or known[0] is not value:
            description = Description(constants=self._constants)
            known = (value, description.value(value), description.symbolic)
            self._values[id(value)] = known
        return known[1], known[2]

    def case(self, node: Node, target: Any, values: Sequence[Any], result: Any, *, overwrites: bool = False) -> Case:
        """Describe a call.

        Args:
            node: The call.
            target: Its operator, or the one that it gets.
            values: The values of `node.all_input_nodes`.
            result: What it returns.
            overwrites: Whether it overwrites its first operand, which nothing reads afterwards.

        Raises:
            Uncovered: It has an operand or argument of an unexpected type.
        """
        operands = tuple(node.all_input_nodes)
        numbers = {operand: index for index, operand in enumerate(operands)}
        description = Description()
        arguments = description.arguments((node.args, node.kwargs), numbers.__getitem__)
        described = [self._described(value) for value in values]
        key = (target, arguments, tuple(entry[0] for entry in described))
        symbolic = description.symbolic or any(entry[1] for entry in described)
        return Case(key, symbolic, node, operands, tuple(values), result, overwrites)


@dataclass(frozen=True, slots=True)
class Rows:
    """Cases side by side in one graph: each has inputs and outputs of its own.

    Attributes:
        graph: The graph.
        inputs: The placeholders of each case.
        copies: The copy of its first operand that a case overwrites.
        outputs: How many outputs each case has.
    """

    graph: Graph
    inputs: tuple[tuple[Node, ...], ...]
    copies: tuple[Node | None, ...]
    outputs: tuple[int, ...]


def place_side_by_side(cases: Sequence[Case]) -> Rows:
    """Make one graph of cases that have nothing to do with each other.

    Raises:
        Uncovered: A result is of an unexpected type.
    """
    graph = Graph()
    inputs = tuple(
        tuple(_placeholder(graph, f"case{number}_{index}", value) for index, value in enumerate(case.values))
        for number, case in enumerate(cases)
    )
    outputs: list[Node] = []
    counts, copies = [], []
    for number, (case, row) in enumerate(zip(cases, inputs, strict=True)):
        env = dict(zip(case.operands, row, strict=True))
        copies.append(_copy(graph, case, env, number) if case.overwrites else None)
        args, kwargs = map_arg((case.node.args, dict(case.node.kwargs)), env.__getitem__)
        call = graph.create_node("call_function", case.node.target, tuple(args), dict(kwargs))
        _describe(call, case.result, number)
        results = list(_tensors(graph, call, number))
        outputs += results
        counts.append(len(results))
    graph.output(tuple(outputs)).meta["val"] = tuple(node.meta["val"] for node in outputs)
    return Rows(graph, inputs, tuple(copies), tuple(counts))


def _copy(graph: Graph, case: Case, env: dict[Node, Node], number: int) -> Node:
    """Copy what a case overwrites: it is no input of the program that the case is from."""
    written = case.node.args[0]
    copied = graph.call_function(torch.ops.aten.clone.default, (env[written],))  # type: ignore[index]
    _describe(copied, env[written].meta["val"], number)  # type: ignore[index]
    env[written] = copied  # type: ignore[index]
    return copied


def _placeholder(graph: Graph, name: str, value: Any) -> Node:
    node = graph.placeholder(name)
    node.meta["val"] = renew(value, None)
    return node


def _describe(node: Node, value: Any, number: int) -> None:
    """Give a call what torch requires of the metadata of nodes, and the number of its case."""
    node.meta["val"] = value
    node.meta["nn_module_stack"] = {"": ("", "torch.nn.Module")}
    node.meta["stack_trace"] = f'File "case", line {number + 1}, in forward\n'
    node.meta["torch_fn"] = ("case", "case")


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
