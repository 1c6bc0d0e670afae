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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from exir_lowering.plans.planned import LiveTensor, PlannedMemory
from exir_lowering.pte.peak import find_peak
from exir_lowering.steps import execution_order

_LISTED = 64
"""How many tensors of a peak are described."""


def configure(config: ExecutorchBackendConfig, planner: str) -> ExecutorchBackendConfig:
    """Return a configuration whose memory is planned by a planner of that name, where it names no other algorithm."""
    if planner == "greedy":
        return config
    given = config.memory_planning_pass
    if isinstance(given, Mapping):
        return replace(config, memory_planning_pass={name: _named(one, planner) for name, one in given.items()})
    return replace(config, memory_planning_pass=_named(given, planner))


def _named(given: Any, planner: str) -> Any:
    usual = getattr(getattr(given, "memory_planning_algo", None), "algo_list", None) == [greedy]
    if not isinstance(given, MemoryPlanningPass) or not usual:
        return given
    changed = copy.copy(given)
    changed.memory_planning_algo = _ALGORITHMS[planner]()
    return changed


class Planned(Exception):
    """Ends ExecuTorch's conversion after it has planned the memory: it has no other way to stop there."""


class Planning:
    """Plans the memory of each method in the place of the passes of a configuration, and keeps what was planned."""

    def __init__(self, config: ExecutorchBackendConfig, methods: Sequence[str], *, only: bool = False) -> None:
        given, usual = config.memory_planning_pass, ExecutorchBackendConfig().memory_planning_pass
        self._passes = [given.get(name, usual) if isinstance(given, Mapping) else given for name in methods]
        self._names, self._only = list(methods), only
        self._planned: list[tuple[GraphModule, Any, int | None]] = []  # with what ExecuTorch's greedy planned
        self.enable_non_cpu_memory_planning = False  # set by ExecuTorch

    def run(self, module: GraphModule, signature: Any) -> Any:
        """Plan the memory of the next method; called by ExecuTorch in the place of a pass of its own."""
        inner = self._passes[len(self._planned)]
        if hasattr(inner, "enable_non_cpu_memory_planning"):
            inner.enable_non_cpu_memory_planning = self.enable_non_cpu_memory_planning
        algorithm = getattr(inner, "memory_planning_algo", None)
        if isinstance(algorithm, _Smallest):
            result = algorithm.run(inner, module, signature)
        else:
            result = inner.run(module, signature) if hasattr(inner, "run") else inner(module)
        before = algorithm.before if isinstance(algorithm, _Smallest) else None
        self._planned.append((result.graph_module, signature, before))
        return result

    def run_multimethod(self) -> None:
        """Plan what methods have in common; called by ExecuTorch once, after the last method."""
        for inner in {id(one): one for one in self._passes}.values():
            if hasattr(inner, "run_multimethod"):
                inner.run_multimethod()
        if self._only:
            raise Planned

    def describe(self) -> dict[str, PlannedMemory]:
        """Return what was planned, by method."""
        planned, self._planned = self._planned, []  # ExecuTorch's manager keeps this object
        return {name: _describe(*each) for name, each in zip(self._names, planned, strict=True)}


# -- what was planned --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Span:
    """A tensor in planned memory, by the node that makes it."""

    node: Node
    result: int  # its number among the node's results; -1 for the memory of the graphs that a node calls
    spec: Any
    offset: int
    bytes: int
    first: int
    last: int


def _describe(module: GraphModule, signature: Any, before: int | None) -> PlannedMemory:
    sizes = module.meta.get("non_const_buffer_sizes", ())[1:]
    spans: dict[int, list[_Span]] = {1: list(_nested(module))}
    seen: set[Any] = set()
    for node in module.graph.nodes:
        if node.op in ("get_attr", "output") or node.target in (memory.alloc, memory.view):
            continue
        for number, spec in enumerate(get_node_tensor_specs(node)):
            if spec not in seen and spec.mem_offset is not None:
                seen.add(spec)
                span = _Span(node, number, spec, spec.mem_offset, spec.nbytes(), *spec.lifetime)
                spans.setdefault(spec.mem_id, []).append(span)
    peaks = [find_peak(spans.get(number, [])) for number in range(1, len(sizes) + 1)]
    alive = sorted((span for _, _, most in peaks for span in most), key=lambda span: -span.bytes)
    tensors = tuple(_name(module, signature, span) for span in alive[:_LISTED])
    total, peak = sum(sizes), sum(most for most, _, _ in peaks)
    return PlannedMemory(total, peak, len(alive), tensors, total if before is None else before)


def _nested(module: GraphModule) -> Iterator[_Span]:
    """Yield the memory of branches and loops: ExecuTorch keeps as much free as the one that takes most."""
    found = [nested for node in module.graph.nodes for nested in graphs.nested_graphs(module, node)]
    taken = [(sum(nested.module.meta.get("non_const_buffer_sizes", ())), nested.call) for nested in found]
    if taken:
        size, call = max(taken, key=lambda pair: pair[0])
        yield _Span(call, -1, None, 0, size, 0, len(module.graph.nodes))


def _name(module: GraphModule, signature: Any, span: _Span) -> LiveTensor:
    node, spec = span.node, span.spec
    name, made_by, line = node.name, graphs.operator_name(node).rpartition(".")[0], graphs.source_line(node)
    if node.op == "placeholder":
        state = signature.inputs_to_buffers.get(node.target)
        name, made_by = (node.name, "input") if state is None else (state, "state")
    elif graphs.is_delegate_call(node):
        lowered = graphs.attribute(module, str(node.args[0]))
        made_by = lowered.backend_id
        results: Any = lowered.original_module.graph.output_node().args[0]
        line = graphs.source_line(results[span.result])
    if spec is None:
        return LiveTensor(f"graphs that {name} calls", made_by, "", (), span.bytes, line)
    dtype = str(spec.dtype).removeprefix("torch.")
    return LiveTensor(name, made_by, dtype, tuple(map(int, spec.shape)), span.bytes, line)


# -- the smallest ------------------------------------------------------------------------------------------------------


class _Smallest:
    """Plans with what takes least: an algorithm for ExecuTorch's pass, which is run again with other orders."""

    def __init__(self) -> None:
        self.before = 0  # what ExecuTorch's greedy planned in the given order
        self._algorithms: list[Callable[..., MemoryAlgoResult]] = [greedy]

    def __call__(self, *args: Any) -> list[int]:
        """Place tensors; called by the pass."""
        sizes: list[int] = MemoryPlanningAlgorithmSuite(self._algorithms)(*args)
        return sizes

    def run(self, inner: Any, module: GraphModule, signature: Any) -> Any:
        """Run a pass: with ExecuTorch's greedy, with ours too, and so in each order that is proposed; the best stays.

        ExecuTorch's plan stays where the runtime allocates a part of the memory, or the pass itself shares it.
        """
        specs = [spec for _, graph in graphs.walk(module) for node in graph.graph.nodes for spec in _specs(node)]
        given = {spec: (spec.mem_id, spec.mem_obj_id, spec.mem_offset) for spec in specs}
        self._algorithms = [greedy]
        result = inner.run(module, signature)
        self.before = best = _total(module)
        fixed = any(spec.is_dynamic_unbound_tensor for spec in given) or getattr(inner, "share_mutable_buffers", False)
        if fixed or best <= execution_order.least(module):
            return result
        order = kept = [node for node in module.graph.nodes if node.op == "call_function"]
        self._algorithms = [greedy, by_offsets]
        for order in [kept, *execution_order.propose(module)]:
            result = self._again(inner, module, signature, given, order)
            if _total(module) < best or order is kept:
                best, kept = _total(module), order
        return result if order is kept else self._again(inner, module, signature, given, kept)

    def _again(self, inner: Any, module: GraphModule, signature: Any, given: Mapping[Any, Any], order: Any) -> Any:
        execution_order.arrange(module, order)
        for _, graph in graphs.walk(module):
            for node in graph.graph.find_nodes(op="call_function", target=memory.alloc):
                node.meta.pop("spec", None)  # the pass adds it
        for spec, place in given.items():
            spec.mem_id, spec.mem_obj_id, spec.mem_offset = place
            spec.lifetime = [None, None]
        return inner.run(module, signature)


def _specs(node: Node) -> list[Any]:
    return list(get_node_tensor_specs(node)) if node.op != "get_attr" else []


def _total(module: GraphModule) -> int:
    return sum(module.meta["non_const_buffer_sizes"])


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
    change = np.zeros(int(last.max()) + 2, dtype=np.int64)
    np.add.at(change, first, size)
    np.subtract.at(change, last + 1, size)
    alive, lasts = np.cumsum(change), last - first
    widest = np.array([alive[begin : end + 1].max() for begin, end in zip(first, last, strict=True)])
    least, places = -1, first
    for keys in (lasts, size), (size, widest), (lasts, widest), (size, -first), (size, last):
        found = _place(np.lexsort((first, *(-key for key in keys))), size, first, last)
        end = int((found + size).max())
        if least < 0 or end < least:
            least, places = end, found
        if least == alive.max():
            break  # there is no better one
    results = {spec: SpecAllocResult(1, 0, reserved + int(place)) for spec, place in zip(specs, places, strict=True)}
    return MemoryAlgoResult(results, [0, reserved + least + extra_padding])


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


_ALGORITHMS = {"naive": lambda: MemoryPlanningAlgorithmSuite([naive]), "smallest": _Smallest}
