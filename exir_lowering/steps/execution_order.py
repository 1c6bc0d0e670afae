"""Another order of a method's calls, in which less memory may be in use at once.

It goes depth first: what leads to a result is computed just before it, and of two operands first the one whose
computation needs more beyond its result. For trees, that is the best order: Liu, "An application of generalized tree
pebbling to sparse matrix factorization" (1987), after Sethi and Ullman (1970). The caller compares plans.

What runs in another order computes the same: a call stays after all whose results it reads. Calls that do more than
compute (writes in place, random numbers, delegates with state, whatever is not known) are fences: what is before or
after such a call stays there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from executorch.exir import memory
from executorch.exir.memory_planning import get_node_tensor_specs
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.operators import list_arguments, written_arguments
from exir_lowering.errors import InvariantError
from exir_lowering.graphs.operators.purity import only_computes

_KNOWN = ("aten", "dim_order_ops", "quantized_decomposed", "executorch_prim")
"""The namespaces of operators whose out variants only compute, but for random numbers."""


def arrange(module: GraphModule, order: Sequence[Node]) -> None:
    """Put the calls of a graph into an order."""
    output = module.graph.output_node()
    for node in order:
        output.prepend(node)
    module.recompile()


def depth_first(module: GraphModule) -> list[list[Node]]:
    """Return the other order of the calls of a graph whose memory is planned, if there is one.

    Graphs that call others are left as they are.
    """
    for node in module.graph.nodes:
        shared = node.target is memory.alloc and len(node.users) != 1
        if shared or graphs.calls_graphs(module, node):
            return []
    units, before = _divide(module)
    made: list[int] = []
    needs: list[int] = []
    operands: list[list[int]] = []
    for unit, ahead in zip(units, before, strict=True):
        read = [each for node in unit for each in node.all_input_nodes if each not in unit]
        made.append(sum(spec.allocated_memory for spec in _planned(unit) - _planned(read)))
        operands.append(sorted(ahead, key=lambda each: (made[each] - needs[each], each)))
        held = most = 0
        for each in operands[-1]:
            most, held = max(most, held + needs[each]), held + made[each]
        needs.append(max(most, held + made[-1]))
    read_by = set[int]().union(*before)
    waiting = [(number, False) for number in reversed(range(len(units))) if number not in read_by]
    order: dict[int, None] = {}
    while waiting:
        number, ready = waiting.pop()
        if ready:
            order[number] = None
        elif number not in order:
            waiting += [(number, True), *((each, False) for each in reversed(operands[number]) if each not in order)]
    check(list(order), before)
    return [[node for number in order for node in units[number]]] if list(order) != sorted(order) else []


def check(order: Sequence[int], before: Sequence[set[int]]) -> None:
    """Raise InvariantError unless an order has each call once, after all that have to run before it."""
    done, wrong = set[int](), len(order) != len(before)
    for number in order:
        wrong = wrong or number in done or not before[number] <= done
        done.add(number)
    if wrong:
        raise InvariantError("Another order of calls has one too early, twice or not at all. Please report this model.")


def _divide(module: GraphModule) -> tuple[list[list[Node]], list[set[int]]]:
    """Return the calls, each with nodes that stay beside it, and the numbers of those that have to run before each."""
    units: list[list[Node]] = []
    before: list[set[int]] = []
    unit_of: dict[Node, int] = {}
    fence, since = set[int](), list[int]()
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is memory.alloc:
            continue
        if graphs.is_getitem(node) and (call := node.all_input_nodes[0]) in unit_of:
            unit_of[node] = unit_of[call]
            units[unit_of[node]].append(node)
            continue
        number = unit_of[node] = len(units)
        units.append([*(each for each in node.all_input_nodes if each.target is memory.alloc), node])
        before.append({unit_of[each] for each in node.all_input_nodes if each in unit_of} | fence)
        if not _only_computes(module, node):
            before[number].update(since)
            fence, since = {number}, []
        since.append(number)
    return units, before


def _planned(nodes: Iterable[Node]) -> set[Any]:
    """Return the tensors in planned memory that nodes stand for."""
    found = (spec for node in nodes if node.op != "get_attr" for spec in get_node_tensor_specs(node))
    return {spec for spec in found if spec.mem_offset is not None}


def _only_computes(module: GraphModule, node: Node) -> bool:
    if graphs.is_delegate_call(node):
        original = graphs.attribute(module, str(node.args[0])).original_module
        called = (each for each in original.graph.nodes if each.op == "call_function")
        return not graphs.written_state(original) and all(map(only_computes, called))
    return node.target is memory.view or _is_pure(node.target) or only_computes(node)


def _is_pure(target: Any) -> bool:
    """Return whether an operator writes its result into the memory that it is given for that, and does nothing else."""
    packet = getattr(target, "overloadpacket", None)
    if packet is None or target.namespace not in _KNOWN:
        return False
    if any(torch.Tag.nondeterministic_seeded in getattr(packet, name).tags for name in packet.overloads()):
        return False
    results = tuple(argument.name for argument in list_arguments(target) if argument.out)
    return bool(results) and written_arguments(target) == results
