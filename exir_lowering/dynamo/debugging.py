"""What torch.compile would do: the backend that prints it, and the function that returns it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, GraphModule

from exir_lowering._upstream.dynamo import GraphCompileReason, call_compiled, eager, ending, outside_tracing
from exir_lowering.dynamo.compiled import Boxed, find_executor
from exir_lowering.dynamo.compiler import NAME, Function, try_each, warn_of_mode
from exir_lowering.dynamo.graph import GraphCompiler, Modules, Weights, capture_all
from exir_lowering.dynamo.logs import Fallback, Kind, Log, NotLowered
from exir_lowering.dynamo.lowering import plan_graphs
from exir_lowering.dynamo.options import list_candidates, read_options
from exir_lowering.dynamo.partitioning import takes_any
from exir_lowering.graphs.sources import Frame
from exir_lowering.plans.lowering_plan import LoweringPlan
from exir_lowering.plugins import registry

DEBUG_NAME = "exir_lowering_debug"


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """What would be done with the AOTAutograd graphs of one Dynamo graph.

    Attributes:
        attempt: What would be tried: partitioners, or a backend of the option `backends`.
        kind: What the first graph is. A backward graph that would be lowered with its forward graph is in that plan.
        plan: What would be delegated, and why the rest would not.
    """

    attempt: str
    kind: Kind
    plan: LoweringPlan


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Where Dynamo ends a graph before the function ends.

    Attributes:
        reason: Why, in Dynamo's words.
        source: The line of the program, "" if not known.
    """

    reason: str
    source: str

    def __str__(self) -> str:
        lines = [line.strip() for line in self.reason.strip().splitlines()]
        explained = [line.partition(": ")[2] for line in lines if line.startswith("Explanation: ")]
        return ": ".join([*lines[:1], *explained]) + (f" ({self.source})" if self.source else "")


@dataclass(frozen=True, slots=True)
class ExplainedGraph:
    """What would be done with one Dynamo graph.

    Attributes:
        number: Which graph it is, from 0.
        graph: The graph, as `print_tabular` prints it.
        backend: What would run it: "exir_lowering", or the torch.compile backend that it would fall back to.
        plans: A plan for each graph of AOTAutograd, or for a forward graph and its backward graph together.
        fallbacks: What would fail before that, or in a backward graph.
        graph_break: Why it ends before the function ends; None if it does not.
    """

    number: int
    graph: str
    backend: str
    plans: tuple[GraphPlan, ...]
    fallbacks: tuple[Fallback, ...]
    graph_break: GraphBreak | None = None

    def plan_text(self, *, width: int = 120) -> str:
        """Return what would be done, without the graph.

        Args:
            width: How many characters a line of a plan may have.
        """
        lines = [f"{self.backend} would run it.", *(str(fallback) for fallback in self.fallbacks)]
        if self.graph_break is not None:
            lines.append(f"It ends with a graph break: {self.graph_break}")
        for one in self.plans:
            lines += ["", f"{one.attempt}, {one.kind} graph:", one.plan.to_text(width=width, everything=True).rstrip()]
        return "\n".join(lines)

    def to_text(self, *, width: int = 120) -> str:
        """Return the graph, and what would be done with it.

        Args:
            width: How many characters a line of a plan may have.
        """
        return f"{self.graph}\n\n{self.plan_text(width=width)}"

    def __str__(self) -> str:
        return self.to_text()


@dataclass(frozen=True, slots=True)
class Explanation:
    """What torch.compile would do with a function, for the inputs that it was called with.

    Attributes:
        graphs: The Dynamo graphs, in the order of compilation.
        graph_breaks: Where execution leaves the compiled code, also before a graph that would be empty.
    """

    graphs: tuple[ExplainedGraph, ...]
    graph_breaks: tuple[GraphBreak, ...]

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """What would not be compiled as asked, in all graphs."""
        return tuple(fallback for graph in self.graphs for fallback in graph.fallbacks)

    def to_text(self, *, width: int = 120) -> str:
        """Return all graphs, what would be done with each, and the graph breaks.

        Args:
            width: How many characters a line of a plan may have.
        """
        parts = [f"graphs: {len(self.graphs)}, graph breaks: {len(self.graph_breaks)}"]
        parts += [f"graph break: {graph_break}" for graph_break in self.graph_breaks]
        for graph in self.graphs:
            parts.append(f"\ngraph {graph.number}:\n{textwrap.indent(graph.to_text(width=width - 4), '    ')}")
        return "\n".join(parts)

    def __str__(self) -> str:
        return self.to_text()


def debug_backend(
    module: GraphModule, example_inputs: Sequence[Any], *, options: Any = None, mode: str | None = None
) -> Callable[..., Any]:
    """Print a Dynamo graph and what `backend="exir_lowering"` would do with it; PyTorch runs it.

    Args:
        module: The graph.
        example_inputs: Its inputs.
        options: A dict with attributes of `CompileOptions`.
        mode: Has no effect, as there are no modes; a warning says so.

    Returns:
        The graph's `forward`.

    Raises:
        InputError, UnknownPluginError, PluginLoadError: An option is invalid.
    """
    warn_of_mode(DEBUG_NAME, mode)
    explained = _explain_graph(module, example_inputs, options, 0)
    print(f"{DEBUG_NAME} called with FX graph:\n{explained}\n")
    forward: Callable[..., Any] = module.forward
    return forward


def explain(
    function: Callable[..., Any], *inputs: Any, options: Any = None, dynamic: bool | None = None, **keywords: Any
) -> Explanation:
    """Return what `torch.compile(function, backend="exir_lowering")` would do, over all its graphs and graph breaks.

    The function is called once, with the inputs, in PyTorch; no backend is called. Earlier compilations of it are kept.
    Backward graphs are planned where inputs or parameters require gradients, and these are enabled.

    Args:
        function: A function or a module, compiled or not.
        inputs: What it is called with.
        options: As for the backend.
        dynamic: As for `torch.compile`.
        keywords: What it is called with by name.

    Raises:
        InputError, UnknownPluginError, PluginLoadError: An option is invalid.
    """
    chosen = read_options(options)
    list_candidates(chosen)  # so that a wrong option is an error before the function is called
    graphs: list[ExplainedGraph] = []

    def collect(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        explained = _explain_graph(module, example_inputs, chosen, len(graphs))
        reason = ending(module)
        if reason is not None and reason.graph_break:
            explained = replace(explained, graph_break=_graph_break(reason))
        graphs.append(explained)
        forward: Callable[..., Any] = module.forward
        return forward

    reasons = call_compiled(function, inputs, keywords, collect, dynamic)
    return Explanation(tuple(graphs), tuple(dict.fromkeys(map(_graph_break, reasons))))


def _graph_break(reason: GraphCompileReason) -> GraphBreak:
    where = [Frame(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in reason.user_stack[-1:]]
    return GraphBreak(reason.reason, str(where[0]) if where else "")


def _explain_graph(module: GraphModule, example_inputs: Sequence[Any], options: Any, number: int) -> ExplainedGraph:
    """Return what would be done with a graph of Dynamo's. No backend is called."""
    candidates, fallback = list_candidates(read_options(options))
    graph = to_table(module.graph)
    log = _PlanLog()
    would = try_each(candidates, fallback, _Planner, module, example_inputs, log, strict=False)
    log.backend = NAME if would is not None else str(fallback or "nothing")
    return ExplainedGraph(number, graph, log.backend, tuple(log.plans), tuple(log.fallbacks))


class _PlanLog(Log):
    """What would happen to a graph; it is in no report."""

    def __init__(self) -> None:
        super().__init__(listed=False)
        self.plans: list[GraphPlan] = []


class _PlanCompiler(GraphCompiler):
    """Plans graphs where `GraphCompiler` compiles them."""

    _log: _PlanLog

    def compile(self, kind: Kind, modules: Modules, weights: Weights) -> dict[str, Boxed]:
        """Plan graphs together; PyTorch runs them."""
        attempt = self._attempt
        with outside_tracing():
            plan = plan_graphs(kind, capture_all(modules, weights), attempt)
        for backend_id in plan.backend_ids:
            registry.find_backend(backend_id, attempt.backends)
            find_executor(backend_id, attempt.options.delegates)
        self._log.plans.append(GraphPlan(attempt.name, kind, plan))
        if attempt.must_take and not takes_any(plan.methods):
            raise NotLowered("it took no operator")
        return {name: eager(module) for name, module in modules.items()}


class _Planner(Function):
    """Plans the graphs that AOTAutograd makes of one function, where `Function` compiles them."""

    compiler_type = _PlanCompiler

    def forward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Plan a forward graph and its backward graph, which AOTAutograd would ask for in the first backward pass."""
        function = super().forward(module, example_inputs)
        for first, second in self._pairs:
            if first is module:
                self.backward(second, ())
        return function


_HEADERS = ("opcode", "name", "target", "args", "kwargs")
_PADDING = 2  # by how much a column is at least wider than its header


def to_table(graph: Graph) -> str:
    """Return the nodes of a graph as `Graph.print_tabular` prints them, without the package that it needs for that."""
    rows = [
        [" ".join(str(cell).split("\n")) for cell in (node.op, node.name, node.target, node.args, node.kwargs)]
        for node in graph.nodes
    ]
    widths = [
        max(len(header) + _PADDING, *(len(row[column]) for row in rows)) for column, header in enumerate(_HEADERS)
    ]
    lines = [list(_HEADERS), ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
