"""The torch.compile backend that shows what the other one would do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from exir_lowering._upstream.dynamo import eager, outside_tracing
from exir_lowering.dynamo.attempts import Attempt, list_candidates
from exir_lowering.dynamo.compiler import NAME, through_autograd, warn_of_mode
from exir_lowering.dynamo.execution import Boxed
from exir_lowering.dynamo.explained import ExplainedGraph, GraphPlan
from exir_lowering.dynamo.function import Function, target_of
from exir_lowering.dynamo.graph import GraphCompiler, Weights
from exir_lowering.dynamo.hazards import NotLowered
from exir_lowering.dynamo.logs import Kind, Log
from exir_lowering.dynamo.lowering import Target, plan_graphs
from exir_lowering.dynamo.options import read_options
from exir_lowering.dynamo.partitions import find_executor
from exir_lowering.dynamo.profit import takes_any
from exir_lowering.dynamo.tables import to_table
from exir_lowering.errors import LoweringError
from exir_lowering.plugins import registry

DEBUG_NAME = "exir_lowering_debug"


def debug_backend(
    module: GraphModule, example_inputs: Sequence[Any], *, options: Any = None, mode: str | None = None
) -> Callable[..., Any]:
    """Print a graph of Dynamo's and what `backend="exir_lowering"` would do with it; PyTorch runs it.

    Args:
        module: The graph.
        example_inputs: Its inputs.
        options: A dict with attributes of `CompileOptions`.
        mode: Changes nothing: there are no modes. A warning says so.

    Returns:
        The graph's own function.

    Raises:
        InputError, UnknownPluginError, PluginLoadError: An option is invalid.
    """
    warn_of_mode(DEBUG_NAME, mode)
    explained = explain_graph(module, example_inputs, options, 0)
    print(f"{DEBUG_NAME} called with FX graph:\n{explained}\n")
    forward: Callable[..., Any] = module.forward
    return forward


def explain_graph(module: GraphModule, example_inputs: Sequence[Any], options: Any, number: int) -> ExplainedGraph:
    """Return what would be done with a graph of Dynamo's. No backend is called.

    Raises InputError, UnknownPluginError or PluginLoadError if an option is invalid.
    """
    chosen = read_options(options)
    candidates, fallback = list_candidates(chosen)
    graph = to_table(module.graph)
    log = PlanLog()
    log.backend = str(fallback or "nothing")
    for position, candidate in enumerate(candidates):
        instead = candidates[position + 1].name if position + 1 < len(candidates) else log.backend
        try:
            through_autograd(module, example_inputs, candidate.make(), chosen, log, strict=False, function=Planner)
            log.backend = NAME
            break
        except (NotLowered, LoweringError) as error:
            log.note(candidate.name, "function", error, instead)
    return ExplainedGraph(number, graph, log.backend, tuple(log.plans), tuple(log.fallbacks))


class PlanLog(Log):
    """What would happen to a graph; it is in no report."""

    def __init__(self) -> None:
        super().__init__(listed=False)
        self.plans: list[GraphPlan] = []


class Planner(Function):
    """Plans the graphs that AOTAutograd makes of one function, where `Function` compiles them."""

    _log: PlanLog

    def _make_compiler(self) -> GraphCompiler:
        return _PlanCompiler(target_of(self._attempt, self._options), self._attempt, self._log)

    def forward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Plan a forward graph and its backward graph, which AOTAutograd would ask for in the first backward pass."""
        function = super().forward(module, example_inputs)
        for first, second in self._pairs:
            if first is module:
                self.backward(second, ())
        return function


class _PlanCompiler(GraphCompiler):
    """Plans graphs where `GraphCompiler` compiles them."""

    def __init__(self, target: Target, attempt: Attempt, log: PlanLog) -> None:
        super().__init__(target, must_take=attempt.must_take, log=log)
        self._attempt, self._plans = attempt, log.plans

    def compile(self, kind: Kind, modules: Mapping[str, GraphModule], weights: Weights) -> dict[str, Boxed]:
        """Plan graphs together; PyTorch runs them."""
        with outside_tracing():
            plan = plan_graphs(self._capture(modules, weights), self._target.of_kind(kind))
        for backend_id in plan.backend_ids:
            registry.find_backend(backend_id, self._target.backends)
            find_executor(backend_id, self._target.delegates)
        self._plans.append(GraphPlan(self._attempt.name, kind, plan))
        if self._must_take and not takes_any(plan.methods):
            raise NotLowered("it took no operator")
        return {name: eager(module) for name, module in modules.items()}
