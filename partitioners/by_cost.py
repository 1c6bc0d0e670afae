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
from exir_lowering.partitioners.cost.tables import CostModel
from exir_lowering.partitioners.supports.support import SupportLike


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a method costs by the model, nested graphs included.

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

    The cost is the sum of what each operator costs where it is, and, for each value and each place other than its own
    where it is read, of its bytes times the model's `byte_cost`: once for each destination. Values are the results of
    operators and the method's inputs, which come from the host; the method's outputs, new values of buffers among them,
    are read on the host. Parameters, buffers and constants are everywhere. getitem, and what a support or partitioner
    wants together, is where its producer is, and has no cost.

    For one backend the assignment is the cheapest there is, by minimum cut, in exact arithmetic; of several that are,
    the one that delegates least. For B backends it is an approximation by expansion moves, see `assignment`: at most B
    times the cheapest, of which the operators' part counts once. It never costs more than leaving everything on the
    host, nor than delegating everything that can be to the first backend that takes it.

    When the model has a `call_cost`, each partition costs that too. Partitions come after the cut, so then it is a
    heuristic: from the cut and from delegating everything, partitions go back to the host as long as that is cheaper.
    It still never costs more than either of them or the host alone.

    Nested graphs are assigned first, each on its own. To what the model says of an operator that calls graphs (nothing
    is 0) comes what they cost, as assigned, or with all of their operators in the backend that takes it whole. What
    makes no tensor, such as a size, is free on the host unless the model says what it costs.

    Args:
        costs: A `CostTable`, a `RooflineModel`, or a `CostModel` of your own. What it has no cost for on a backend
            cannot be there; on the host it is an error.
        supports: For each backend what it can take, in priority order; the costs say what it should. Or a partitioner,
            see `from_partitioner`.
        compile_specs: For each backend id what it is to be told.
        limits: How small and how large a partition may be; what they drop is left to the host whatever it costs.

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

        Nodes stay together as in the matches of the partitioner's configurations if it has these, as XNNPACK's has, and
        they are merged into as few partitions as can be. Of other partitioners each partition is kept or left whole.
        What the partitioner takes and keeps from decomposition cannot be on the host: ExecuTorch relies on that, as
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

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], Callable[[Node], bool] | None]:
        """Keep the operators whole that the partitioner chosen from wants whole."""
        if self._inner is None:
            return [], None
        kept: tuple[list[Any], Callable[[Node], bool] | None] = self._inner.ops_to_not_decompose(ep)
        return kept

    def partition(self, exported_program: ExportedProgram) -> ExplainedResult:
        """Tag what is cheaper in a backend.

        Args:
            exported_program: A program in Edge dialect; its nodes get tags.

        Returns:
            The tagged program, with a rejection for each operator that is left: with the figures, code "cost", or why
            no backend can take it.

        Raises:
            InputError: The model has no cost for an operator on the host, or a cost that is invalid.
            PartitionerContractError: A support, or the partitioner chosen from, raised or broke its promise.
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
        """Tell what a program in Edge dialect costs by the model, `limits` aside. The program is not changed.

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
    """Check that a model that says which places it knows knows the backends."""
    known = getattr(costs, "places", None) or getattr(costs, "flops_per_second", None) or {}
    for backend_id in backends if known else ():
        if backend_id not in known:
            close = difflib.get_close_matches(backend_id, list(known), n=2)
            hint = f"Did you mean {' or '.join(map(repr, close))}?" if close else f"It has {', '.join(known)}."
            raise InputError(f"{who}: the costs have no place {backend_id!r}, a backend that is to be chosen. {hint}")


def _check_model(who: str, costs: Any) -> None:
    missing = [name for name in ("node_cost", "byte_cost", "call_cost", "unit") if not hasattr(costs, name)]
    if missing:
        raise InputError(
            f"{who}: got the costs {costs!r}, which has no {', no '.join(missing)}; expected a CostTable, a "
            f"RooflineModel or an object with the methods of CostModel."
        )


__all__ = ["CostPartitioner", "Estimate"]
