"""Who plans the memory of methods, by name, and what was planned.

"greedy" and "naive" are ExecuTorch's. "smallest" is ExecuTorch's greedy, or what takes less: our places of tensors, and
another order of the calls (see `execution_order`).

Our places are those of Pisarchyk and Lee, "Efficient memory management for deep neural net inference" (2020): each
tensor goes into the smallest gap between those that are in use at the same time; by size, by how much is in use while
it is, or by time, whichever is best. ExecuTorch's greedy fills objects that have the size of their first tensor, and
puts no tensor across two of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
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
from exir_lowering.plans.planned import LiveTensor, MethodPlan, PlannedMemory
from exir_lowering.steps import execution_order


def configure(config: ExecutorchBackendConfig, planner: str) -> ExecutorchBackendConfig:
    """Return a configuration whose memory is planned by a planner of that name, where it names no other algorithm."""
    given = config.memory_planning_pass
    if isinstance(given, Mapping):
        return replace(config, memory_planning_pass={name: _named(one, planner) for name, one in given.items()})
    return replace(config, memory_planning_pass=_named(given, planner))


def _named(given: Any, planner: str) -> Any:
    usual = getattr(getattr(given, "memory_planning_algo", None), "algo_list", None) == [greedy]
    if planner == "greedy" or not isinstance(given, MemoryPlanningPass) or not usual:
        return given
    changed = copy.copy(given)
    changed.memory_planning_algo = _Smallest() if planner == "smallest" else MemoryPlanningAlgorithmSuite([naive])
    return changed


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
        self._planned.append((result.graph_module, signature, before))
        return result

    def run_multimethod(self) -> None:
        """Plan what methods have in common; called by ExecuTorch once, after the last method."""
        for inner in {id(one): one for one in self._passes}.values():
            if hasattr(inner, "run_multimethod"):
                inner.run_multimethod()
        if self._only:
            raise Planned(self)

    def describe(self, methods: Sequence[MethodPlan]) -> tuple[MethodPlan, ...]:
        """Return methods with the memory that was planned."""
        planned, self._planned = self._planned, []  # ExecuTorch's manager keeps this object
        memory = {name: _describe(*each) for name, each in zip(self._names, planned, strict=True)}
        return tuple(replace(method, memory=memory[method.name]) for method in methods)


# -- what was planned --------------------------------------------------------------------------------------------------


def _describe(module: GraphModule, signature: Any, before: int | None) -> PlannedMemory:
    found: dict[Any, tuple[Node, int]] = {}  # the node that makes each tensor, and its number among the results
    for node in module.graph.nodes:
        if node.op not in ("get_attr", "output") and node.target not in (memory.alloc, memory.view):
            for number, spec in enumerate(get_node_tensor_specs(node)):
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
        nodes = [node for _, graph in graphs.walk(module) for node in graph.graph.nodes if node.op != "get_attr"]
        specs = [spec for node in nodes for spec in get_node_tensor_specs(node)]
        given = {spec: (spec.mem_id, spec.mem_obj_id, spec.mem_offset) for spec in specs}

        def again(order: Sequence[Node]) -> Any:
            execution_order.arrange(module, order)
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
        orders = [calls, *execution_order.depth_first(module)]
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
