"""A partitioner for backends that can say, node by node, what they take.

It makes an ExecuTorch `PartitionResult`: tags, owned constants, and a reason for each operator that is left.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from executorch.exir.backend.utils import tag_constant_data, tag_mutated_buffer
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from exir_lowering import (
    Adjustment,
    CompileSpec,
    DelegationSpec,
    ExplainedResult,
    InputError,
    Partitioner,
    Rejection,
    graphs,
)
from exir_lowering.partitioners.algorithms import limits as capacity
from exir_lowering.partitioners.algorithms.convex import Proposal, list_computing, propose_partitions
from exir_lowering.partitioners.algorithms.limits import Limits
from exir_lowering.partitioners.supports.support import (
    Check,
    GraphScope,
    No,
    Support,
    SupportLike,
    as_support,
    make_check,
    scopes,
)


class SupportPartitioner(Partitioner):  # type: ignore[misc]
    """Gives each backend the fewest convex partitions of what it supports, and says why the rest stays on the host.

    Args:
        supports: For each backend id, what it supports: a `Support`, a torch.fx `OperatorSupportBase`, or a function
            from a node to a bool. The first backend that takes a node gets it.
        compile_specs: The compile specs of each backend id.
        limits: How small and how large a partition may be.
        keep_apart: Whether parts of a partition that share no edge become separate partitions.
        own_state: Whether a buffer that one partition alone reads and writes moves into it; for backends that keep
            state from one call to the next.
        keep_whole: ATen operators, such as `torch.ops.aten.linear.default`, that are not decomposed on the way to Edge
            dialect where a backend supports them.

    Raises:
        InputError: An argument is invalid.
    """

    def __init__(
        self,
        supports: Mapping[str, SupportLike],
        *,
        compile_specs: Mapping[str, Sequence[CompileSpec]] | None = None,
        limits: Limits | None = None,
        keep_apart: bool = False,
        own_state: bool = False,
        keep_whole: Sequence[Any] = (),
    ) -> None:
        super().__init__()
        self.supports = _check_supports(type(self).__name__, supports)
        self.compile_specs = _check_specs(type(self).__name__, self.supports, compile_specs)
        self.limits, self.keep_apart = limits or Limits(), keep_apart
        self.own_state, self.keep_whole = own_state, list(keep_whole)

    def partition(self, exported_program: ExportedProgram) -> ExplainedResult:
        """Tag what the backends support.

        Args:
            exported_program: A program in Edge dialect; its nodes get tags.

        Returns:
            The tagged program with a rejection for each operator that is left.

        Raises:
            PartitionerContractError: A support raised.
            InputError: A group of nodes that must stay together cannot be convex.
        """
        claims = _Claims(self)
        for scope in claims.scopes(exported_program):
            groups = [group for support in self.supports.values() for group in support.groups(scope)]
            claims.settle(scope, self._propose(scope, groups), groups)
        tag_constant_data(exported_program)
        if self.own_state:
            tag_mutated_buffer(exported_program)
        return ExplainedResult(
            exported_program, claims.destinations, tuple(claims.rejections.values()), tuple(claims.adjustments)
        )

    def _propose(self, scope: GraphScope, groups: Sequence[Sequence[Node]]) -> Sequence[Proposal]:
        """Return proposals for a graph, in topological order; the groups are nodes that must stay together."""
        return propose_partitions(scope, self.supports, keep_apart=self.keep_apart)

    @property
    def asked_of_forms(self) -> Partitioner:
        """Who says whether a form would be taken: of a few operators alone, hardly any saves anything."""
        if self.limits.min_gain is None:
            return self
        asked = copy.copy(self)
        asked.limits = replace(self.limits, min_gain=None)
        return asked

    def describe_requests(self) -> Sequence[Any] | None:
        """Return what `ops_to_not_decompose` depends on, for the cache: what supports answer is not known."""
        return None if self.keep_whole else ()

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], Callable[[Node], bool] | None]:
        """Keep the operators of `keep_whole` where a backend supports them."""
        if not self.keep_whole:
            return [], None
        constants = {node.name for node in graphs.lifted_inputs(ep)}
        checks: dict[Any, list[Check]] = {}

        def supported(node: Node) -> bool:
            if node.target not in self.keep_whole:  # at the end it is the Edge operator, which may stay whole
                return False
            if node.graph not in checks:  # the given program, or ExecuTorch's copy of it
                held = frozenset(n for n in node.graph.nodes if n.op == "placeholder" and n.name in constants)
                scope = GraphScope(node.graph.owning_module or GraphModule({}, node.graph), held)
                checks[node.graph] = [make_check(support, scope) for support in self.supports.values()]
            return any(check(node) is None for check in checks[node.graph])

        return list(self.keep_whole), supported


@dataclass
class _Claims:
    """What is claimed of one program, graph by graph; the program's nodes get tags."""

    partitioner: SupportPartitioner
    destinations: dict[str, DelegationSpec] = field(default_factory=dict)
    rejections: dict[str, Rejection] = field(default_factory=dict)  # the first one of each operator
    adjustments: list[Adjustment] = field(default_factory=list)
    _moved: set[tuple[str, ...]] = field(default_factory=set)

    def scopes(self, program: ExportedProgram) -> Iterator[GraphScope]:
        """Yield the graphs, the top one first, without those that a claimed operator calls: they move with it."""
        for scope in scopes(program):
            if not any(scope.path[:i] in self._moved for i in range(1, len(scope.path) + 1)):
                yield scope

    def settle(self, scope: GraphScope, proposals: Sequence[Proposal], groups: Sequence[Sequence[Node]]) -> None:
        """Claim the proposals of a graph within limits, and give each operator that is left a reason."""
        limits, who = self.partitioner.limits, type(self.partitioner).__name__
        kept, rejections, adjustments = capacity.apply(proposals, limits, scope, groups=groups, by=who)
        self._claim(scope, kept)
        self.adjustments += adjustments
        self.rejections.update((rejection.node, rejection) for rejection in rejections)
        checks = {place: make_check(support, scope) for place, support in self.partitioner.supports.items()}
        for node in list_computing(scope.graph_module):
            name = graphs.qualified_name(scope.path, node)
            if graphs.is_operator(node) and graphs.DELEGATION_TAG not in node.meta and name not in self.rejections:
                no = _explain({place: check(node) for place, check in checks.items()})
                operator = graphs.operator_name(node)
                self.rejections[name] = Rejection("", name, operator, no.text, no.by or who, no.code)

    def _claim(self, scope: GraphScope, proposals: Iterable[Proposal]) -> None:
        """Tag the nodes of each proposal with a tag of its own."""
        for proposal in proposals:
            tag = f"{proposal.backend}_{len(self.destinations)}"
            specs = list(self.partitioner.compile_specs.get(proposal.backend, ()))
            self.destinations[tag] = DelegationSpec(proposal.backend, specs)
            for node in proposal.nodes:
                node.meta[graphs.DELEGATION_TAG] = tag
                for nested in graphs.nested_graphs(scope.graph_module, node):
                    self._moved.add((*scope.path, nested.name))


def _explain(answers: Mapping[str, No | None]) -> No:
    """Return why no backend takes a node, given what each of them said."""
    said = {backend_id: no for backend_id, no in answers.items() if no is not None}
    if len(said) < len(answers):
        return No("group", "a node that it must stay together with is not supported", "")
    first, *others = said.values()
    if not others:
        return first
    text = "; ".join(f"{backend_id}: {no.text}" for backend_id, no in said.items())
    return No(first.code, text, ", ".join(dict.fromkeys(no.by for no in said.values())))


def _check_supports(who: str, supports: Any) -> dict[str, Support]:
    if not isinstance(supports, Mapping) or not supports or not all(isinstance(key, str) and key for key in supports):
        raise InputError(
            f"{who}: got supports={supports!r}, expected a mapping from backend ids to what each backend supports, "
            "such as {'MyBackend': ops('aten.add.Tensor')}."
        )
    return {backend_id: as_support(support) for backend_id, support in supports.items()}


def _check_specs(
    who: str, backends: Mapping[str, Any], given: Mapping[str, Sequence[CompileSpec]] | None
) -> dict[str, list[CompileSpec]]:
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise InputError(f"{who}: got compile_specs={given!r}, expected a mapping from backend ids to lists.")
    for backend_id, specs in given.items():
        if backend_id not in backends:
            raise InputError(
                f"{who}: compile_specs names {backend_id!r}, which is not one of its backends: {', '.join(backends)}."
            )
        if not isinstance(specs, (list, tuple)) or not all(isinstance(spec, CompileSpec) for spec in specs):
            raise InputError(f"{who}: compile_specs[{backend_id!r}] is {specs!r}, expected a list of CompileSpec.")
    return {backend_id: list(specs) for backend_id, specs in given.items()}
