"""From proposals to an ExecuTorch `PartitionResult`: tags, owned constants, and a reason for each operator left."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from executorch.exir.backend.utils import tag_constant_data, tag_mutated_buffer
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import Adjustment, CompileSpec, DelegationSpec, ExplainedResult, Rejection, graphs
from exir_lowering.partitioners.algorithms import limits as capacity
from exir_lowering.partitioners.algorithms.convex import Proposal, list_computing
from exir_lowering.partitioners.algorithms.limits import Limits
from exir_lowering.partitioners.supports.support import No, Scope, Support, make_check, scopes


@dataclass
class Claims:
    """What a partitioner claims of one program, graph by graph; the program's nodes get tags."""

    program: ExportedProgram
    compile_specs: Mapping[str, Sequence[CompileSpec]]
    by: str  # the partitioner's name, for the rejections
    _destinations: dict[str, DelegationSpec] = field(default_factory=dict)
    _rejections: dict[str, Rejection] = field(default_factory=dict)
    _adjustments: list[Adjustment] = field(default_factory=list)
    _moved: set[tuple[str, ...]] = field(default_factory=set)

    def scopes(self) -> Iterator[Scope]:
        """Yield the graphs, the top one first, without those that a claimed operator calls: they move with it."""
        for scope in scopes(self.program):
            if not any(scope.path[:i] in self._moved for i in range(1, len(scope.path) + 1)):
                yield scope

    def settle(
        self,
        scope: Scope,
        proposals: Sequence[Proposal],
        limits: Limits,
        *,
        groups: Sequence[Sequence[Node]],
        why: Callable[[Node], No | None],
    ) -> None:
        """Claim the proposals of a graph within limits, and give each operator that is left a reason.

        The proposals are in topological order, the groups are nodes that must stay together; `why` returns None for an
        operator whose reason has already been given.
        """
        kept, rejections, adjustments = capacity.apply(proposals, limits, scope, groups=groups, by=self.by)
        self._claim(scope, kept)
        self.explain(rejections, adjustments)
        for node in list_computing(scope.graph_module):
            if graphs.is_operator(node) and graphs.DELEGATION_TAG not in node.meta:
                no = why(node)
                if no is not None:
                    self._reject(scope, node, no)

    def _claim(self, scope: Scope, proposals: Iterable[Proposal]) -> None:
        """Tag the nodes of each proposal with a tag of its own."""
        for proposal in proposals:
            tag = f"{proposal.backend}_{len(self._destinations)}"
            specs = list(self.compile_specs.get(proposal.backend, ()))
            self._destinations[tag] = DelegationSpec(proposal.backend, specs)
            for node in proposal.nodes:
                node.meta[graphs.DELEGATION_TAG] = tag
                for nested in graphs.nested_graphs(scope.graph_module, node):
                    self._moved.add((*scope.path, nested.name))

    def _reject(self, scope: Scope, node: Node, no: No) -> None:
        """Record why an operator is not claimed; the first reason counts."""
        name = graphs.qualified_name(scope.path, node)
        rejection = Rejection("", name, graphs.operator_name(node), no.text, no.by or self.by, no.code)
        self._rejections.setdefault(name, rejection)

    def explain(self, rejections: Iterable[Rejection], adjustments: Iterable[Adjustment]) -> None:
        """Take over rejections and adjustments from elsewhere; the first rejection of an operator counts."""
        for rejection in rejections:
            self._rejections.setdefault(rejection.node, rejection)
        self._adjustments += adjustments

    def result(self, *, constants: Collection[Node] | None = None, state: bool = False) -> ExplainedResult:
        """Give partitions the constants that they read, and return the result.

        By default every parameter, buffer and constant that is not written may be owned. With `state`, a buffer that
        one partition alone reads and writes moves into it. Its backend must then keep state; one that does not gives
        wrong results, or worse.
        """
        tag_constant_data(self.program)
        if constants is not None:
            for node in graphs.lifted_inputs(self.program):
                if node not in constants:
                    node.meta.pop(graphs.DELEGATION_TAG, None)
        if state:
            tag_mutated_buffer(self.program)
        return ExplainedResult(
            self.program, self._destinations, tuple(self._rejections.values()), tuple(self._adjustments)
        )


def explain(supports: Mapping[str, Support], scope: Scope) -> Callable[[Node], No]:
    """Return a function that says why no backend takes a node of a graph."""
    checks = {backend_id: make_check(support, scope) for backend_id, support in supports.items()}

    def why(node: Node) -> No:
        found = {backend_id: check(node) for backend_id, check in checks.items()}
        if any(no is None for no in found.values()):
            return No("group", "a node that it must stay together with is not supported", "")
        said = {backend_id: no for backend_id, no in found.items() if no is not None}
        if len(said) == 1:
            return next(iter(said.values()))
        text = "; ".join(f"{backend_id}: {no.text}" for backend_id, no in said.items())
        return No(next(iter(said.values())).code, text, ", ".join(dict.fromkeys(no.by for no in said.values())))

    return why


__all__ = ["Claims", "explain"]
