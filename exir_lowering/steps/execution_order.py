"""Orders of a method's calls in which less memory is in use at once.

A graph leaves open in which order independent operators and delegates run; the model's source decides it. Two other
orders are proposed, and the caller keeps one only where its planned memory is smaller:

* depth first: what leads to a result is computed just before it, and of two operands first the one whose computation
  needs more beyond its result: the order of Sethi and Ullman, "The generation of optimal code for arithmetic
  expressions" (1970), and of Liu, "An application of generalized tree pebbling to sparse matrix factorization" (1987);
* list scheduling: of all calls that are ready, the one after which the least is in use.

What runs in another order computes the same: a call stays after all whose results it reads. Calls that do more than
compute (writes in place, random numbers, delegates with state, whatever is not known) are fences: what is before or
after such a call stays there.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
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


def propose(module: GraphModule) -> Iterator[list[Node]]:
    """Yield other orders of the nodes of a graph whose memory is planned, each with less in use at once.

    Graphs that call others are left as they are, as are those with memory that the runtime allocates.
    """
    for node in module.graph.nodes:
        shared = node.target is memory.alloc and len(node.users) != 1
        if shared or node.target is memory.free or graphs.calls_graphs(module, node):
            return
    calls = _Calls(module)
    peak = calls.peak(range(len(calls.units)))
    for order in (calls.depth_first(), calls.list_schedule()):
        calls.check(order)
        reached = calls.peak(order)
        if reached < peak:
            yield [node for number in order for node in calls.units[number]]


def least(module: GraphModule) -> int:
    """Return how much is in use at least, in whatever order the calls of a graph run."""
    return _Calls(module).least()


def arrange(module: GraphModule, order: Sequence[Node]) -> None:
    """Put the calls of a graph into an order."""
    output = module.graph.output_node()
    for node in order:
        output.prepend(node)
    module.recompile()


class _Calls:
    """The calls of a graph: units of nodes that stay together, what each uses, and what has to run before it."""

    def __init__(self, module: GraphModule) -> None:
        self.units: list[list[Node]] = []
        self.uses: list[list[Any]] = []  # the planned tensors that each reads or makes
        self.before: list[set[int]] = []
        unit_of: dict[Node, int] = {}
        fence, since = set[int](), list[int]()
        for node in module.graph.nodes:
            if node.op != "call_function" or node.target is memory.alloc:
                continue
            if graphs.is_getitem(node) and node.args[0] in unit_of:  # a result of a call
                unit_of[node] = unit_of[node.args[0]]
                self.units[unit_of[node]].append(node)
                continue
            number = unit_of[node] = len(self.units)
            results = [user for user in node.users if graphs.is_getitem(user)]
            self.units.append([*(each for each in node.all_input_nodes if each.target is memory.alloc), node])
            self.uses.append(_planned([node, *node.all_input_nodes, *results]))
            self.before.append({unit_of[each] for each in node.all_input_nodes if each in unit_of} | fence)
            if not _only_computes(module, node):
                self.before[number].update(since)
                fence, since = {number}, []
            since.append(number)
        self.given = set(_planned(module.graph.find_nodes(op="placeholder")))
        output = module.graph.output_node()
        ends = [spec.lifetime[1] for spec in _planned([output, *output.all_input_nodes])]
        # what is returned, and state, which lasts from the first call to the last one
        self.kept = {spec for uses in [*self.uses, [*self.given]] for spec in uses if spec.lifetime[1] in ends[:1]}
        self.size: dict[Any, int] = {
            spec: spec.allocated_memory for uses in [*self.uses, [*self.given]] for spec in uses
        }

    def least(self) -> int:
        """Return how much is in use at least, in any order: by the call that uses most, beside given state."""
        always = self.given & self.kept
        beside = [sum(self.size[spec] for spec in uses if spec not in always) for uses in self.uses]
        return sum(self.size[spec] for spec in always) + max(beside, default=0)

    def peak(self, order: Sequence[int]) -> int:
        """Return how much is in use at most if the calls run in an order."""
        left = Counter(spec for uses in self.uses for spec in uses)
        now = most = sum(self.size[spec] for spec in self.given)
        begun = set(self.given)
        for number in order:
            for spec in self.uses[number]:
                now += 0 if spec in begun else self.size[spec]
                begun.add(spec)
            most = max(most, now)
            for spec in self.uses[number]:
                left[spec] -= 1
                now -= self.size[spec] if not left[spec] and spec not in self.kept else 0
        return most

    def check(self, order: Sequence[int]) -> None:
        """Raise InvariantError unless an order has each call once, after all that have to run before it."""
        place = {number: at for at, number in enumerate(order)}
        if len(order) != len(self.units) or len(place) != len(order):
            raise InvariantError("An order of calls has one twice, or lacks one. Please report this program.")
        for number, before in enumerate(self.before):
            if any(place[each] >= place[number] for each in before):
                raise InvariantError("An order has a call before what it reads. Please report this program.")

    def depth_first(self) -> list[int]:
        """Return the calls so that each comes just after what only it needs, and of that first what needs the most."""
        made: list[int] = []
        needs: list[int] = []
        operands: list[list[int]] = []
        for number, uses in enumerate(self.uses):
            read = {spec for node in self.units[number][-1:] for spec in _planned(_read(node))}
            made.append(sum(self.size[spec] for spec in uses if spec not in read))
            before = sorted(self.before[number], key=lambda each: (made[each] - needs[each], each))
            operands.append(before)
            held = most = 0
            for each in before:
                most = max(most, held + needs[each])
                held += made[each]
            needs.append(max(most, held + made[number]))
        order: dict[int, None] = {}
        read_by = set[int]().union(*self.before)
        waiting = [(number, False) for number in reversed(range(len(self.units))) if number not in read_by]
        while waiting:
            number, ready = waiting.pop()
            if ready:
                order[number] = None
            elif number not in order:
                waiting.append((number, True))
                waiting += [(each, False) for each in reversed(operands[number]) if each not in order]
        return list(order)

    def list_schedule(self) -> list[int]:
        """Return the calls so that each is, of those that are ready, the one after which the least is in use."""
        users: dict[Any, set[int]] = {}
        after: list[list[int]] = [[] for _ in self.units]
        for number, uses in enumerate(self.uses):
            for spec in uses:
                users.setdefault(spec, set()).add(number)
            for each in self.before[number]:
                after[each].append(number)
        left, begun, order = [len(before) for before in self.before], set(self.given), dict[int, None]()

        def cost(number: int) -> tuple[int, int]:
            uses = self.uses[number]
            more = sum(self.size[spec] for spec in uses if spec not in begun)
            less = sum(self.size[spec] for spec in uses if len(users[spec]) == 1 and spec not in self.kept)
            return more - less, number

        ready = [cost(number) for number, count in enumerate(left) if not count]
        heapq.heapify(ready)
        while ready:
            _, number = heapq.heappop(ready)
            if number in order:
                continue  # it was added again when it became cheaper
            order[number] = None
            for spec in self.uses[number]:
                begun.add(spec)
                users[spec].discard(number)
                for last in users[spec] if len(users[spec]) == 1 else ():
                    if not left[last]:
                        heapq.heappush(ready, cost(last))
            for each in after[number]:
                left[each] -= 1
                if not left[each]:
                    heapq.heappush(ready, cost(each))
        return list(order)


def _read(node: Node) -> list[Node]:
    return [each for each in node.all_input_nodes if each.target is not memory.alloc]


def _planned(nodes: Iterable[Node]) -> list[Any]:
    """Return the tensors in planned memory that nodes stand for, each once."""
    found = (spec for node in nodes if node.op != "get_attr" for spec in get_node_tensor_specs(node))
    return list(dict.fromkeys(spec for spec in found if spec.mem_id is not None and spec.mem_offset is not None))


def _only_computes(module: GraphModule, node: Node) -> bool:
    if graphs.is_delegate_call(node):
        original = graphs.attribute(module, str(node.args[0])).original_module
        called = (each for each in original.graph.nodes if each.op == "call_function")
        return not graphs.written_state(original) and all(map(only_computes, called))
    return node.target is memory.view or _is_pure(node.target) or only_computes(node)


@lru_cache(maxsize=4096)
def _is_pure(target: Any) -> bool:
    """Return whether an operator writes its result into the memory that it is given for that, and does nothing else."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in _KNOWN:
        return False
    packet = target.overloadpacket
    if any(torch.Tag.nondeterministic_seeded in getattr(packet, name).tags for name in packet.overloads()):
        return False
    results = tuple(argument.name for argument in list_arguments(target) if argument.out)
    return bool(results) and written_arguments(target) == results
