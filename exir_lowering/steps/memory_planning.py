"""Who plans the memory of methods, ExecuTorch's planners by name, and what was planned."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from executorch.exir import ExecutorchBackendConfig, memory
from executorch.exir.memory_planning import MemoryPlanningAlgorithmSuite, get_node_tensor_specs, greedy, naive
from executorch.exir.passes import MemoryPlanningPass
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering.errors import InvariantError
from exir_lowering.graphs.checksums import checksum
from exir_lowering.plans.planned import LiveTensor, PlannedMemory
from exir_lowering.plans.xnnpack import estimate
from exir_lowering.pte.device_memory import DeviceMemory, add_up
from exir_lowering.steps.file import File


def configure(config: ExecutorchBackendConfig, planner: str) -> ExecutorchBackendConfig:
    """Return a configuration whose memory is planned by a planner of that name, where it names no other algorithm."""

    def named(given: Any) -> Any:
        usual = getattr(getattr(given, "memory_planning_algo", None), "algo_list", None) == [greedy]
        if planner == "greedy" or not isinstance(given, MemoryPlanningPass) or not usual:
            return given
        changed = copy.copy(given)
        changed.memory_planning_algo = MemoryPlanningAlgorithmSuite([naive])
        return changed

    given = config.memory_planning_pass
    chosen = {name: named(one) for name, one in given.items()} if isinstance(given, Mapping) else named(given)
    return replace(config, memory_planning_pass=chosen)


def plans_results(config: ExecutorchBackendConfig, method: str) -> bool:
    """Return whether the memory of a method's results is planned, or its caller provides it."""
    given = config.memory_planning_pass
    return bool(getattr(given.get(method) if isinstance(given, Mapping) else given, "alloc_graph_output", True))


class Planning:
    """Plans the memory of each method in the place of the passes of a configuration, and keeps what was planned."""

    def __init__(self, file: File) -> None:
        given, usual = file.config.memory_planning_pass, ExecutorchBackendConfig().memory_planning_pass
        self._names, self._place_state = list(file.programs), file.place_state
        self._passes = [given.get(name, usual) if isinstance(given, Mapping) else given for name in self._names]
        self._planned: list[tuple[GraphModule, Any]] = []
        self.enable_non_cpu_memory_planning = False  # set by ExecuTorch

    def run(self, module: GraphModule, signature: Any) -> Any:
        """Plan the memory of the next method; called by ExecuTorch in the place of a pass of its own."""
        inner, name = self._passes[len(self._planned)], self._names[len(self._planned)]
        if hasattr(inner, "enable_non_cpu_memory_planning"):
            inner.enable_non_cpu_memory_planning = self.enable_non_cpu_memory_planning
        result = inner.run(module, signature) if hasattr(inner, "run") else inner(module)
        if name in self._place_state:
            self._place_state[name](result.graph_module, signature)
        _keep_results(result.graph_module)
        self._planned.append((result.graph_module, signature))
        return result

    def run_multimethod(self) -> None:
        """Plan what methods have in common; called by ExecuTorch once, after the last method."""
        for inner in {id(one): one for one in self._passes}.values():
            if hasattr(inner, "run_multimethod"):
                inner.run_multimethod()

    def describe(self, *, device: bool = False) -> dict[str, PlannedMemory]:
        """Return the memory that was planned for each method, and what it will take on a device if that is asked."""
        planned, self._planned = self._planned, []  # ExecuTorch's manager keeps this object
        return {name: _describe(*each, device) for name, each in zip(self._names, planned, strict=True)}


def _keep_results(module: GraphModule) -> None:
    """Let branches make results in the memory of `cond`: ExecuTorch plans theirs as free again when the call ends."""
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


def _describe(module: GraphModule, signature: Any, device: bool) -> PlannedMemory:
    found: dict[Any, tuple[Node, int]] = {}  # the node that makes each tensor, and its number among the results
    for node in module.graph.nodes:
        if node.op != "output" and node.target not in (memory.alloc, memory.view):
            for number, spec in enumerate(_specs(node)):
                if spec.mem_offset is not None and spec.storage_base is None:
                    found.setdefault(spec, (node, number))
    spans = [(*spec.lifetime, spec.nbytes(), _name(module, signature, spec, *made)) for spec, made in found.items()]
    spans += _nested(module)
    first, last, size = np.array([span[:3] for span in spans] or [(0, 0, 0)], dtype=np.int64).T
    change = np.zeros(int(last.max()) + 2, dtype=np.int64)
    np.add.at(change, first, size)
    np.subtract.at(change, last + 1, size)
    in_use = np.cumsum(change)  # bytes, at each time
    at, total = int(in_use.argmax()), sum(module.meta.get("non_const_buffer_sizes", ()))
    alive = sorted((span[3] for span in spans if span[0] <= at <= span[1]), key=lambda tensor: -tensor.bytes)
    taken = _on_device(module, signature, total) if device else None
    return PlannedMemory(total, int(in_use[at]), tuple(alive), taken)


def _on_device(module: GraphModule, signature: Any, planned: int) -> DeviceMemory:
    """Return what a method will take on a device, whose partitions are not lowered yet."""
    inputs = [(node, spec) for node in module.graph.find_nodes(op="placeholder") for spec in _specs(node)]
    buffers, calls = signature.inputs_to_buffers, (getattr(owner, name) for _, owner, name in graphs.delegates(module))
    state = sum(spec.nbytes() for node, spec in inputs if node.target in buffers and spec.mem_offset is not None)
    constants = {checksum(spec.storage): spec.nbytes() for _, spec in inputs if spec.const}  # equal ones are there once
    delegates = [estimate(one.backend_id, one.original_module) for one in calls]
    return add_up(planned, state, sum(constants.values()), delegates)


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


def _specs(node: Node) -> Sequence[Any]:
    return () if node.op == "get_attr" else get_node_tensor_specs(node)
