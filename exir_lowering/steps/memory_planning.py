"""Who plans the memory of methods, by name, and what was planned.

"greedy" and "naive" are ExecuTorch's. "smallest" is ExecuTorch's greedy, or what takes less: our places of tensors, and
another order of the calls, in which less may be in use at once.

Our places are those of Pisarchyk and Lee, "Efficient memory management for deep neural net inference" (2020): each
tensor goes into the smallest gap between those that are in use at the same time; by size, by how much is in use while
it is, or by time, whichever is best. ExecuTorch's greedy fills objects that have the size of their first tensor, and
puts no tensor across two of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from executorch.exir import ExecutorchBackendConfig, memory
from executorch.exir.memory_planning import (
    MemoryAlgoResult,
    MemoryPlanningAlgorithmSuite,
    SpecAllocResult,
    get_node_tensor_specs,
    greedy,
    naive,
)
from executorch.exir.passes import MemoryPlanningPass
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.operators import list_arguments, written_arguments
from exir_lowering.errors import InvariantError
from exir_lowering.graphs.operators.purity import only_computes
from exir_lowering.plans.planned import LiveTensor, PlannedMemory

_KNOWN = ("aten", "dim_order_ops", "quantized_decomposed", "executorch_prim")
"""The namespaces of operators whose out variants only compute, but for random numbers."""


def configure(config: ExecutorchBackendConfig, planner: str) -> ExecutorchBackendConfig:
    """Return a configuration whose memory is planned by a planner of that name, where it names no other algorithm."""
    given = config.memory_planning_pass
    by_method = isinstance(given, Mapping)
    named = {name: _named(one, planner) for name, one in given.items()} if by_method else _named(given, planner)
    return replace(config, memory_planning_pass=named)


def _named(given: Any, planner: str) -> Any:
    usual = getattr(getattr(given, "memory_planning_algo", None), "algo_list", None) == [greedy]
    if planner == "greedy" or not isinstance(given, MemoryPlanningPass) or not usual:
        return given
    changed = copy.copy(given)
    changed.memory_planning_algo = _Smallest() if planner == "smallest" else MemoryPlanningAlgorithmSuite([naive])
    return changed


def plans_results(config: ExecutorchBackendConfig, method: str) -> bool:
    """Return whether the memory of a method's results is planned, or its caller provides it."""
    given = config.memory_planning_pass
    return bool(getattr(given.get(method) if isinstance(given, Mapping) else given, "alloc_graph_output", True))


class Planned(Exception):
    """Ends ExecuTorch's conversion after it has planned the memory, which has no other way to stop; has the plan."""


class Planning:
    """Plans the memory of each method in the place of the passes of a configuration, and keeps what was planned."""

    def __init__(self, config: ExecutorchBackendConfig, methods: Sequence[str], *, only: bool) -> None:
        given, usual = config.memory_planning_pass, ExecutorchBackendConfig().memory_planning_pass
        self._passes = [given.get(name, usual) if isinstance(given, Mapping) else given for name in methods]
        self._names, self._only = methods, only
        self._planned: list[tuple[GraphModule, Any, int | None]] = []  # with what ExecuTorch's greedy planned
        self.enable_non_cpu_memory_planning = False  # set by ExecuTorch

    def run(self, module: GraphModule, signature: Any) -> Any:
        """Plan the memory of the next method; called by ExecuTorch in the place of a pass of its own."""
        inner, before = self._passes[len(self._planned)], None
        if hasattr(inner, "enable_non_cpu_memory_planning"):
            inner.enable_non_cpu_memory_planning = self.enable_non_cpu_memory_planning
        algorithm = getattr(inner, "memory_planning_algo", None)
        if isinstance(algorithm, _Smallest):
            result, before = algorithm.run(inner, module, signature)
        else:
            result = inner.run(module, signature) if hasattr(inner, "run") else inner(module)
        _keep_results(result.graph_module)
        self._planned.append((result.graph_module, signature, before))
        return result

    def run_multimethod(self) -> None:
        """Plan what methods have in common; called by ExecuTorch once, after the last method."""
        for inner in {id(one): one for one in self._passes}.values():
            if hasattr(inner, "run_multimethod"):
                inner.run_multimethod()
        if self._only:
            raise Planned(self)

    def describe(self) -> dict[str, PlannedMemory]:
        """Return the memory that was planned for each method."""
        planned, self._planned = self._planned, []  # ExecuTorch's manager keeps this object
        return {name: _describe(*each) for name, each in zip(self._names, planned, strict=True)}


def _keep_results(module: GraphModule) -> None:
    """Let branches make their results in the memory that is planned for `cond`, which ExecuTorch leaves unused.

    ExecuTorch plans the memory of each graph that is called as if it were free again when the call ends, but returns
    a branch's results in it: the next call would overwrite them.
    """
    for node in module.graph.nodes:
        for nested in graphs.nested_graphs(module, node):
            if node.target is torch.ops.higher_order.cond:
                made = _specs(nested.module.graph.output_node())
                for result, kept in zip(made, _specs(node), strict=True):
                    if result.mem_offset is None or kept.mem_offset is None:
                        continue  # the runtime allocates it, or the caller
                    if result.allocated_memory > kept.allocated_memory:
                        raise InvariantError(
                            f"{node.name}: a branch returns {result.allocated_memory} bytes, but ExecuTorch planned "
                            f"{kept.allocated_memory} for what it returns. Please report this program."
                        )
                    result.mem_id, result.mem_obj_id, result.mem_offset = kept.mem_id, kept.mem_obj_id, kept.mem_offset
            _keep_results(nested.module)


# -- what was planned --------------------------------------------------------------------------------------------------


def _describe(module: GraphModule, signature: Any, before: int | None) -> PlannedMemory:
    found: dict[Any, tuple[Node, int]] = {}  # the node that makes each tensor, and its number among the results
    for node in module.graph.nodes:
        if node.op != "output" and node.target not in (memory.alloc, memory.view):
            for number, spec in enumerate(_specs(node)):
                if spec.mem_offset is not None and spec.storage_base is None:
                    found.setdefault(spec, (node, number))
    spans = [(*spec.lifetime, spec.nbytes(), _name(module, signature, spec, *made)) for spec, made in found.items()]
    spans += _nested(module)
    in_use = _in_use(*np.array([span[:3] for span in spans] or [(0, 0, 0)], dtype=np.int64).T)
    at, total = int(in_use.argmax()), sum(module.meta.get("non_const_buffer_sizes", ()))
    alive = sorted((span[3] for span in spans if span[0] <= at <= span[1]), key=lambda tensor: -tensor.bytes)
    return PlannedMemory(total, int(in_use[at]), tuple(alive), total if before is None else before)


def _in_use(first: Any, last: Any, size: Any) -> Any:
    """Return how many bytes are in use at each time."""
    change = np.zeros(int(last.max()) + 2, dtype=np.int64)
    np.add.at(change, first, size)
    np.subtract.at(change, last + 1, size)
    return np.cumsum(change)


def _nested(module: GraphModule) -> Iterator[tuple[int, int, int, LiveTensor]]:
    """Yield the memory of branches and loops: ExecuTorch keeps as much free as the one that takes most."""
    found = [nested for node in module.graph.nodes for nested in graphs.nested_graphs(module, node)]
    taken = [(sum(nested.module.meta.get("non_const_buffer_sizes", ())), nested.call) for nested in found]
    for size, call in sorted(taken, key=lambda pair: -pair[0])[:1]:
        what = f"graphs that {call.name} calls", graphs.operator_name(call), "", ()
        yield 0, len(module.graph.nodes), size, LiveTensor(*what, size, graphs.source_line(call))


def _name(module: GraphModule, signature: Any, spec: Any, node: Node, result: int) -> LiveTensor:
    name, made_by, line = node.name, graphs.operator_name(node).rpartition(".")[0], graphs.source_line(node)
    if node.op == "placeholder":
        state = signature.inputs_to_buffers.get(node.target)
        name, made_by = (name, "input") if state is None else (state, "state")
    elif graphs.is_delegate_call(node):
        lowered = graphs.attribute(module, str(node.args[0]))
        results: Any = lowered.original_module.graph.output_node().args[0]
        made_by, line = lowered.backend_id, graphs.source_line(results[result])
    dtype = str(spec.dtype).removeprefix("torch.")
    return LiveTensor(name, made_by, dtype, tuple(map(int, spec.shape)), spec.nbytes(), line)


# -- the smallest ------------------------------------------------------------------------------------------------------


class _Smallest(MemoryPlanningAlgorithmSuite):  # type: ignore[misc]
    """Plans with what takes least: an algorithm for ExecuTorch's pass, which is run several times."""

    def run(self, inner: Any, module: GraphModule, signature: Any) -> tuple[Any, int]:
        """Run a pass with ExecuTorch's greedy, with ours too, and so in another order; the smallest plan stays.

        Also return what greedy takes. It stays where the runtime allocates some tensors, or the pass shares some.
        """
        nodes = [node for _, node in graphs.every_node(module)]
        given = {spec: (spec.mem_id, spec.mem_obj_id, spec.mem_offset) for node in nodes for spec in _specs(node)}

        def again(order: Sequence[Node]) -> Any:
            output = module.graph.output_node()
            for node in order:
                output.prepend(node)
            module.recompile()
            for node in nodes:
                if node.target is memory.alloc:
                    node.meta.pop("spec", None)  # the pass adds it
            for spec, place in given.items():
                spec.mem_id, spec.mem_obj_id, spec.mem_offset = place
                spec.lifetime = [None, None]
            return inner.run(module, signature)

        self.algo_list = [greedy]
        result = inner.run(module, signature)
        before = sum(module.meta["non_const_buffer_sizes"])
        if getattr(inner, "share_mutable_buffers", False) or any(spec.is_dynamic_unbound_tensor for spec in given):
            return result, before
        self.algo_list, sizes = [greedy, by_offsets], []
        calls = [node for node in module.graph.nodes if node.op == "call_function"]
        orders = [calls, *depth_first(module)]
        for order in orders:
            result = again(order)
            sizes.append(sum(module.meta["non_const_buffer_sizes"]))
        best = orders[sizes.index(min(sizes))]
        return result if best is order else again(best), before


def by_offsets(
    alignment: int, specs: Sequence[Any], graph_module: GraphModule, signature: Any, extra_padding: int = 0
) -> MemoryAlgoResult:
    """Place tensors in gaps between those that are in use at the same time; the interface is ExecuTorch's."""
    reserved = [*(getattr(graph_module, "input_mem_buffer_sizes", None) or ()), 0, 0][1]
    if not specs or any(spec.storage_base is not None or spec.mem_id not in (None, 1) for spec in specs):
        return greedy(alignment, specs, graph_module, signature, extra_padding)
    for spec in specs:
        spec.realign(alignment)
    size = np.array([spec.allocated_memory for spec in specs], dtype=np.int64)
    first, last = np.array([spec.lifetime for spec in specs], dtype=np.int64).T
    lasts, in_use = last - first, _in_use(first, last, size)
    widest = np.array([in_use[begin : end + 1].max() for begin, end in zip(first, last, strict=True)])
    keys = (first, -lasts, -size), (first, -lasts, -widest), (-size, first)
    found = [_place(np.lexsort(key), size, first, last) for key in keys]
    places = min(found, key=lambda each: int((each + size).max()))
    results = {spec: SpecAllocResult(1, 0, reserved + int(place)) for spec, place in zip(specs, places, strict=True)}
    return MemoryAlgoResult(results, [0, reserved + int((places + size).max()) + extra_padding])


def _place(order: Any, size: Any, first: Any, last: Any) -> Any:
    """Return offsets: each tensor gets the smallest gap that it fits into, in the order given."""
    begin, end, placed = np.zeros_like(size), np.zeros_like(size), np.zeros(len(size), dtype=bool)
    for each in order:
        beside = np.flatnonzero(placed & (first <= last[each]) & (last >= first[each]))
        beside = beside[np.argsort(begin[beside], kind="stable")]
        reached = np.maximum.accumulate(np.concatenate(([0], end[beside])))
        gaps = begin[beside] - reached[:-1]
        fitting = np.flatnonzero(gaps >= size[each])
        begin[each] = reached[fitting[np.argmin(gaps[fitting])]] if len(fitting) else reached[-1]
        end[each], placed[each] = begin[each] + size[each], True
    return begin


# -- another order of the calls ----------------------------------------------------------------------------------------


def depth_first(module: GraphModule) -> list[list[Node]]:
    """Return the other order of the calls of a graph whose memory is planned, if there is one and it calls no graph.

    It goes depth first: what leads to a result is computed just before it, and of two operands first the one whose
    computation needs more beyond its result. For trees, that is the best order: Liu, "An application of generalized
    tree pebbling to sparse matrix factorization" (1987), after Sethi and Ullman (1970).
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
    check_order(list(order), before)
    return [[node for number in order for node in units[number]]] if list(order) != sorted(order) else []


def check_order(order: Sequence[int], before: Sequence[set[int]]) -> None:
    """Raise InvariantError unless an order has each call once, after all that have to run before it."""
    done, wrong = set[int](), len(order) != len(before)
    for number in order:
        wrong = wrong or number in done or not before[number] <= done
        done.add(number)
    if wrong:
        raise InvariantError("Another order of calls has one too early, twice or not at all. Please report this model.")


def _divide(module: GraphModule) -> tuple[list[list[Node]], list[set[int]]]:
    """Return the calls, each with nodes that stay beside it, and the numbers of those that have to run before each.

    A call stays after all whose results it reads. Calls that do more than compute (writes in place, random numbers,
    delegates with state, whatever is not known) are fences: what is before or after such a call stays there.
    """
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
    return {spec for node in nodes for spec in _specs(node) if spec.mem_offset is not None}


def _specs(node: Node) -> Sequence[Any]:
    return () if node.op == "get_attr" else get_node_tensor_specs(node)


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
