"""What a plan's prediction asks for costs: a model's answers, checked, and which model a call of the compiler has."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real
from typing import Any

from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.fakes import size_hint
from exir_lowering.errors import InputError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.graphs import measures
from exir_lowering.graphs.walking import OPERAND_LAYOUTS
from exir_lowering.plugins.costs import CostModel
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
        self.per_byte = self._check("byte_cost", self._ask("byte_cost"))
        self._calls: dict[str, float] = {}

    def _ask(self, what: str, *arguments: Any) -> Any:
        """Return the model's answer to a method, or to a property, which takes no arguments."""
        try:
            asked = getattr(self.model, what)
            return asked(*arguments) if arguments else asked
        except Exception as error:
            let_through(error)
            given = ", ".join(map(repr, arguments))
            raise InputError(
                f"The cost model {type(self.model).__name__} raised {type(error).__name__}: {error}. It was asked for "
                f"{what}{f'({given})' if given else ''}, expected a number."
            ) from error

    def _check(self, what: str, cost: Any) -> float:
        number = isinstance(cost, Real) and not isinstance(cost, bool)
        if not number or not 0 <= cost <= sys.float_info.max:
            raise InputError(
                f"The cost model {type(self.model).__name__} has {what} = {cost!r}, expected a finite number of at "
                "least 0."
            )
        return float(cost)

    def node(self, node: Node, place: str, *, calls: bool) -> float:
        """Return what an operator costs at a place, without the graphs that it calls."""
        if self.trusted:
            return _DEFAULT.node_cost(node, place)
        said = self._ask("node_cost", node, place)
        if said is not None:
            return self._check(f"node_cost({graphs.operator_name(node)}, {place!r})", said)
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
            self._calls[place] = self._check(f"call_cost({place!r})", self._ask("call_cost", place))
        return self._calls[place]


def count_trips(node: Node) -> int:
    """Return how often an operator runs its graphs: once for each element of what a map or scan goes over."""
    if graphs.operator_name(node) not in ("map_impl", "scan") or node.target not in OPERAND_LAYOUTS:
        return 1
    mapped: Any = node.args[OPERAND_LAYOUTS[node.target].before[-1]]
    first = mapped[0] if isinstance(mapped, (list, tuple)) and mapped else mapped
    shape: Any = getattr(first.meta.get("val"), "shape", ()) if isinstance(first, Node) else ()
    return size_hint(shape[0]) if len(shape) else 1
