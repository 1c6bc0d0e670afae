"""What a plan's prediction asks for costs: a model's answers, checked, and which model a call of the compiler has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.fakes import size_hint
from exir_lowering.graphs import measures
from exir_lowering.graphs.walking import OPERAND_LAYOUTS
from exir_lowering.plugins.costs import CostModel, ask_cost, check_cost
from exir_lowering.plugins.default_costs import DefaultCosts

_DEFAULT = DefaultCosts()

_planned: ContextVar[CostModel | None] = ContextVar("exir_lowering_planned_costs", default=None)


@contextmanager
def planning_with(model: CostModel | None) -> Iterator[None]:
    """Tell partitioners, while the context lasts, by which model the latency will be predicted; None: the default."""
    token = _planned.set(model)
    try:
        yield
    finally:
        _planned.reset(token)


def planned_costs() -> AskedCosts:
    """Return the costs by which the latency will be predicted: those of the options, or the default ones."""
    return AskedCosts(_planned.get())


def cost_of(nodes: Iterable[Node], place: str, model: CostModel | None = None) -> float:
    """Return the seconds that operators take at a place, without calls of delegates and moving data."""
    costs = AskedCosts(model)
    return sum((costs.node(node, place, calls=False) for node in nodes if graphs.is_operator(node)), 0.0)


class AskedCosts:
    """A model's answers, checked; where it has none, those of the default model."""

    def __init__(self, model: CostModel | None) -> None:
        self.model: CostModel = _DEFAULT if model is None else model
        self.trusted = self.model is _DEFAULT
        self.guessed = 0
        self.per_byte = check_cost(self.model, "byte_cost", ask_cost(self.model, "byte_cost"))
        self._calls: dict[str, float] = {}

    def node(self, node: Node, place: str, *, calls: bool) -> float:
        """Return what an operator costs at a place, without the graphs that it calls."""
        if self.trusted:
            return _DEFAULT.node_cost(node, place)
        said = ask_cost(self.model, "node_cost", node, place)
        if said is not None:
            return check_cost(self.model, f"node_cost({graphs.operator_name(node)}, {place!r})", said)
        if calls or not any(True for _ in measures.tensors(node.meta.get("val"))):
            return 0.0
        self.guessed += 1
        return _DEFAULT.node_cost(node, place)

    def nodes(self, module: GraphModule, nodes: Iterable[Node], place: str) -> float:
        """Return what operators of a graph cost at a place, with everything in the graphs that they call."""
        total = 0.0
        for node in filter(graphs.is_operator, nodes):
            inner = [each.module for each in graphs.nested_graphs(module, node)]
            total += self.node(node, place, calls=bool(inner))
            called = [self.nodes(each, each.graph.nodes, place) for each in inner]
            if graphs.operator_name(node) == "cond":
                called = [max(called)]
            total += sum(called) * count_trips(node)
        return total

    def call(self, place: str) -> float:
        """Return what a call of a partition costs."""
        if place not in self._calls:
            said = ask_cost(self.model, "call_cost", place)
            self._calls[place] = check_cost(self.model, f"call_cost({place!r})", said)
        return self._calls[place]


def count_trips(node: Node) -> int:
    """Return how often an operator runs its graphs: once for each element of what a map or scan goes over."""
    if graphs.operator_name(node) not in ("map_impl", "scan") or node.target not in OPERAND_LAYOUTS:
        return 1
    mapped: Any = node.args[OPERAND_LAYOUTS[node.target].before[-1]]
    first = mapped[0] if isinstance(mapped, (list, tuple)) and mapped else mapped
    shape: Any = getattr(first.meta.get("val"), "shape", ()) if isinstance(first, Node) else ()
    return size_hint(shape[0]) if len(shape) else 1
