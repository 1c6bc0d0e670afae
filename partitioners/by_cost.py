"""A partitioner that delegates what is cheaper to delegate, given what operators and moving their data cost."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import CompileSpec, ExplainedResult, InputError, Partitioner, graphs
from exir_lowering.partitioners.algorithms.claims import Claims
from exir_lowering.partitioners.algorithms.limits import Limits
from exir_lowering.partitioners.algorithms.offers import (
    Offers,
    offers_of_partitioner,
    offers_of_supports,
)
from exir_lowering.partitioners.by_support import compile_specs_of, supports_of
from exir_lowering.partitioners.cost.cost_graph import CostGraph, plan_graphs
from exir_lowering.partitioners.supports.support import SupportLike
from exir_lowering.plugins import CostModel


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a method costs according to the model, including nested graphs.

    Attributes:
        chosen: As the partitioner assigns it.
        greedy: With everything delegated that a backend can take, to the first one that takes it.
        host: Without delegation.
        unit: The unit.
    """

    chosen: float
    greedy: float
    host: float
    unit: str


class CostPartitioner(Partitioner):  # type: ignore[misc]
    """Assigns operators to the host and to backends so that their cost is the least.

    The cost is the sum of what each operator costs at its place and, for each value, of its bytes times the model's
    `byte_cost`, once for each other place where it is read. Values are the results of operators and the method's
    inputs, which come from the host; the method's outputs, including new values of buffers, are read on the host.
    Parameters, buffers and constants are everywhere. A getitem is at the place of its producer and costs nothing; what
    a support or partitioner keeps together is at one place.

    For one backend, the assignment is a cheapest one, by minimum cut, in exact arithmetic; among several, the one that
    delegates least. For B backends, it is an approximation by expansion moves, see `assignment`: at most B times the
    cheapest, of which the operators' part counts once. It never costs more than leaving everything on the host, nor
    more than delegating everything possible to the first backend that takes it.

    If the model has a `call_cost`, each partition costs that too. Partitions are made after the cut, so this is a
    heuristic: starting from the cut and from delegating everything, partitions go back to the host as long as that is
    cheaper. The result still never costs more than either of them or the host alone.

    Nested graphs are assigned first, each on its own. An operator that calls graphs costs what the model says (0 if it
    says nothing), plus the cost of its graphs: as assigned, or with all of their operators in the backend that takes
    it whole. What makes no tensor, such as a size, is free on the host unless the model has a cost for it.

    Args:
        costs: A `CostTable`, a `RooflineModel`, or a `CostModel` of your own. An operator without a
            cost on a backend cannot go there; one without a cost on the host is an error.
        supports: For each backend, what it can take, in priority order; the costs decide what it gets. Or a
            partitioner, see `from_partitioner`.
        compile_specs: The compile specs of each backend id.
        limits: How small and how large a partition may be; what they drop goes to the host whatever it costs.

    Raises:
        InputError: An argument is invalid.
    """

    def __init__(
        self,
        costs: CostModel,
        supports: Mapping[str, SupportLike] | Partitioner,
        *,
        compile_specs: Mapping[str, Sequence[CompileSpec]] | None = None,
        limits: Limits | None = None,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        _check_model(who, costs)
        self.costs, self.limits = costs, limits or Limits()
        self._inner = supports if isinstance(supports, Partitioner) else None
        self._supports = {} if self._inner is not None else supports_of(who, supports)
        self._compile_specs = compile_specs_of(who, self._supports, compile_specs)
        _check_places(who, costs, self._supports)

    def _offers(self, program: ExportedProgram) -> Offers:
        if self._inner is None:
            return offers_of_supports(self._supports, self._compile_specs)
        offers = offers_of_partitioner(program, self._inner)
        _check_places(type(self).__name__, self.costs, offers.places)
        return offers

    @classmethod
    def from_partitioner(
        cls, costs: CostModel, partitioner: Partitioner, *, limits: Limits | None = None
    ) -> CostPartitioner:
        """Choose among what another partitioner delegates.

        If the partitioner has configurations, like XNNPACK's, the nodes of each of their matches stay together, and are
        merged into as few partitions as possible. For other partitioners, each partition is kept or left as a whole.
        What the partitioner takes and keeps from decomposition cannot be on the host: ExecuTorch relies on that, since
        there may be no kernel for it.

        Args:
            costs: The model; its places are the ids of the backends that the partitioner delegates to.
            partitioner: The partitioner. The operators that it wants whole are not decomposed.
            limits: How small and how large a partition may be.

        Raises:
            InputError: An argument is invalid.
        """
        if not isinstance(partitioner, Partitioner):
            raise InputError(
                f"{cls.__name__}: got the partitioner {partitioner!r}, expected an ExecuTorch Partitioner."
            )
        return cls(costs, partitioner, limits=limits)

    def describe_requests(self) -> Sequence[Any]:
        """Return what `ops_to_not_decompose` depends on, for the cache."""
        return [] if self._inner is None else [self._inner]

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], Callable[[Node], bool] | None]:
        """Keep the operators whole that the underlying partitioner wants whole."""
        if self._inner is None:
            return [], None
        kept: tuple[list[Any], Callable[[Node], bool] | None] = self._inner.ops_to_not_decompose(ep)
        return kept

    def partition(self, exported_program: ExportedProgram) -> ExplainedResult:
        """Tag what is cheaper in a backend.

        Args:
            exported_program: A program in Edge dialect; its nodes get tags.

        Returns:
            The tagged program, with a rejection for each operator that is left: the costs, with the code "cost", or the
            reason why no backend can take it.

        Raises:
            InputError: The model has no cost for an operator on the host, or a cost that is invalid.
            PartitionerContractError: A support or the underlying partitioner raised or broke its contract.
        """
        offers = self._offers(exported_program)
        planned = plan_graphs(exported_program, offers, self.costs, CostGraph.cheapest)
        claims = Claims(exported_program, {}, type(self).__name__)
        claims.explain(offers.rejections, offers.adjustments)
        for scope in claims.scopes():
            graph, places = planned[scope.path]
            proposals = graph.proposals(places)
            claims.settle(
                scope,
                proposals,
                self.limits,
                groups=graph.groups,
                why=lambda node, graph=graph, places=places: graph.why(node, places),  # type: ignore[misc]
            )
        result = claims.result(constants=offers.constants)
        for tag, spec in result.partition_tags.items():
            result.partition_tags[tag] = offers.specs[spec.backend_id]
        return result

    def estimate(self, program: ExportedProgram) -> Estimate:
        """Return what a program in Edge dialect costs according to the model, without `limits`; it is not changed.

        Raises:
            InputError, PartitionerContractError: As for `partition`.
        """
        view = graphs.copy_program(program)
        offers = self._offers(view)
        chosen, greedy, host = (
            float(graph.cost(places))
            for graph, places in (
                plan_graphs(view, offers, self.costs, how)[()]
                for how in (CostGraph.cheapest, CostGraph.greedy, CostGraph.host)
            )
        )
        return Estimate(chosen, greedy, host, self.costs.unit)


def _check_places(who: str, costs: CostModel, backends: Iterable[str]) -> None:
    """Check that a model that lists its places includes the backends."""
    known = getattr(costs, "places", None) or getattr(costs, "flops_per_second", None) or {}
    for backend_id in backends if known else ():
        if backend_id not in known:
            close = difflib.get_close_matches(backend_id, list(known), n=2)
            hint = f"Did you mean {' or '.join(map(repr, close))}?" if close else f"It has {', '.join(known)}."
            raise InputError(f"{who}: the costs have no place {backend_id!r}, which is one of the backends. {hint}")


def _check_model(who: str, costs: Any) -> None:
    missing = [name for name in ("node_cost", "byte_cost", "call_cost", "unit") if not hasattr(costs, name)]
    if missing:
        raise InputError(
            f"{who}: got the costs {costs!r}, which has no {', no '.join(missing)}; expected a CostTable, a "
            f"RooflineModel or an object with the methods of CostModel."
        )


__all__ = ["CostPartitioner", "Estimate"]
