"""Distinct calls: calls of an operator that are alike, so that what one of them becomes is what all of them become."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from exir_lowering._upstream.ambient import switches
from exir_lowering._upstream.fakes import FakeTensor, make_sized, may_be_negative
from exir_lowering._upstream.operators import is_built_in
from exir_lowering._upstream.programs import pytree
from exir_lowering._upstream.value_keys import KeyMaker, NotCoveredError, arguments_key, renew


@dataclass(frozen=True, slots=True)
class DistinctCall:
    """A call of an operator, and what its operands are like."""

    key: Hashable  # equal for calls that are alike: operator, arguments, and the types, sizes, strides of the operands
    # whether it means something in one program only: it has symbols, or an operator of users, who may redefine it
    local: bool
    node: Node  # one of the calls
    operands: tuple[Node, ...]  # without repetition
    values: tuple[Any, ...]  # those of the operands
    result: Any  # what the call returns, before its conversion
    overwrites: bool = False  # its first operand, which nothing reads afterwards


class CallKeys:
    """Makes the keys of the calls of one graph; that of a node's value is made once."""

    def __init__(self) -> None:
        self._switches = switches()
        self._values: dict[int, tuple[Any, Hashable, bool]] = {}

    def value(self, value: Any) -> tuple[Hashable, bool]:
        """Return the key of a value, and whether it has symbols."""
        known = self._values.get(id(value))
        if known is None or known[0] is not value:
            maker = KeyMaker()
            known = (value, maker.key(value), maker.symbolic)
            self._values[id(value)] = known
        return known[1], known[2]

    def call(
        self, node: Node, target: Any, values: Sequence[Any], result: Any, *, overwrites: bool = False
    ) -> DistinctCall:
        """Describe a call, whose operator becomes `target`, by the values of its `all_input_nodes`."""
        operands = tuple(node.all_input_nodes)
        numbers = {operand: index for index, operand in enumerate(operands)}
        arguments = arguments_key((node.args, node.kwargs), numbers.__getitem__)
        keys = [self.value(value) for value in values]
        key = (target, arguments, tuple(entry[0] for entry in keys), self._switches)
        local = any(entry[1] for entry in keys) or not is_built_in(target)
        return DistinctCall(key, local, node, operands, tuple(values), result, overwrites)


def place_side_by_side(calls: Sequence[DistinctCall]) -> Graph:
    """Make one graph of calls that have nothing to do with each other; NotCoveredError for an unexpected type.

    Each call has inputs and outputs of its own, in the order of the calls. Sizes with symbols are common to all.
    """
    graph = Graph()
    rows: list[list[Node | None]] = []
    for number, call in enumerate(calls):
        rows.append([])
        for index, value in enumerate(call.values):
            if isinstance(value, torch.SymInt):
                rows[-1].append(None)
                continue
            if not isinstance(value, torch.Tensor):
                raise NotCoveredError(f"an operand of type {type(value).__name__}")
            rows[-1].append(graph.placeholder(f"case{number}_{index}"))
            rows[-1][-1].meta["val"] = renew(value, None)  # type: ignore[union-attr]
    sizes = _add_sizes(graph, calls)
    outputs: list[Node] = []
    for number, (call, row) in enumerate(zip(calls, rows, strict=True)):
        env = {
            operand: placeholder if placeholder is not None else sizes[value.node.expr]
            for operand, placeholder, value in zip(call.operands, row, call.values, strict=True)
        }
        if call.overwrites:  # it is no input of the program that the call is from
            written: Any = call.node.args[0]
            before = env[written]
            env[written] = graph.call_function(torch.ops.aten.clone.default, (before,))
            _describe(env[written], before.meta["val"], number)
        args, kwargs = map_arg((call.node.args, dict(call.node.kwargs)), env.__getitem__)
        made = graph.create_node("call_function", call.node.target, tuple(args), dict(kwargs))
        _describe(made, call.result, number)
        if not isinstance(call.result, (list, tuple)):
            outputs += [] if call.result is None else [made]
            continue
        for index, element in enumerate(call.result):
            if element is None:
                continue
            if not isinstance(element, torch.Tensor):
                raise NotCoveredError(f"{made.target} returns a {type(element).__name__}")
            item = graph.call_function(operator.getitem, (made, index))
            _describe(item, element, number)
            outputs.append(item)
    graph.output(tuple(outputs)).meta["val"] = tuple(node.meta["val"] for node in outputs)
    return graph


def _add_sizes(graph: Graph, calls: Sequence[DistinctCall]) -> dict[Any, Node]:
    """Add an input that has the symbolic sizes among the operands, and a node for each."""
    values = [value for call in calls for value in call.values]
    sizes = {value.node.expr: value for value in values if isinstance(value, torch.SymInt)}
    if not sizes:
        return {}
    tensors = (*values, *pytree.tree_leaves([call.result for call in calls]))
    mode = next((value.fake_mode for value in tensors if isinstance(value, FakeTensor)), None)
    if mode is None:
        raise NotCoveredError("sizes that no tensor has")
    carrier = graph.placeholder("sizes")
    if any(map(may_be_negative, sizes.values())):
        raise NotCoveredError("a number that depends on data, and may be negative")
    carrier.meta["val"] = make_sized(mode, tuple(sizes.values()))
    nodes = {}
    for index, (expression, size) in enumerate(sizes.items()):
        nodes[expression] = graph.call_function(torch.ops.aten.sym_size.int, (carrier, index))
        _describe(nodes[expression], size, 0)
    return nodes


def _describe(node: Node, value: Any, number: int) -> None:
    """Give a call what torch requires of the metadata of nodes, and the number of its distinct call."""
    node.meta["val"] = value
    node.meta["nn_module_stack"] = {"": ("", "torch.nn.Module")}
    node.meta["stack_trace"] = f'File "case", line {number + 1}, in forward\n'
    node.meta["torch_fn"] = ("case", "case")
