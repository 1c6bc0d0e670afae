"""What `explain` returns and the debugging backend prints: values, without tensors."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from exir_lowering.dynamo.logs import Fallback, Kind
from exir_lowering.plans.lowering_plan import LoweringPlan


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
