"""Partitioners for backends that can say what they take: node by node, or as plain Python functions.

It makes an ExecuTorch `PartitionResult`: tags, owned constants, and a reason for each operator that is left.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from torch.export import ExportedProgram, default_decompositions
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
from exir_lowering.partitioners.supports.patterns import Pattern, PatternSupport
from exir_lowering.partitioners.supports.support import Check, GraphScope, SupportLike, as_support, make_check, scopes


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
        rewrites: The rewrites of the default set "safe" that these backends gain from, by name, {"safe"} for all. None
            stands for those that only simplify: "identity", "constants" and "common-subexpressions".
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
        rewrites: Collection[str] | None = None,
    ) -> None:
        super().__init__()
        who, specs = type(self).__name__, {} if compile_specs is None else compile_specs
        if not isinstance(supports, Mapping) or not supports or not all(isinstance(k, str) and k for k in supports):
            raise InputError(
                f"{who}: got supports={supports!r}, expected a mapping from backend ids to what each backend supports, "
                "such as {'MyBackend': ops('aten.add.Tensor')}."
            )
        self.supports = {backend_id: as_support(support) for backend_id, support in supports.items()}
        if not isinstance(specs, Mapping):
            raise InputError(f"{who}: got compile_specs={specs!r}, expected a mapping from backend ids to lists.")
        for backend_id, given in specs.items():
            if backend_id not in self.supports:
                raise InputError(
                    f"{who}: compile_specs names {backend_id!r}, which is not one of its backends: "
                    f"{', '.join(self.supports)}."
                )
            if not isinstance(given, (list, tuple)) or not all(isinstance(spec, CompileSpec) for spec in given):
                raise InputError(f"{who}: compile_specs[{backend_id!r}] is {given!r}, expected a list of CompileSpec.")
        self.compile_specs = {backend_id: list(given) for backend_id, given in specs.items()}
        self.limits, self.keep_apart = limits or Limits(), keep_apart
        self.own_state, self.keep_whole, self.rewrites = own_state, list(keep_whole), rewrites

    def partition(self, exported_program: ExportedProgram) -> ExplainedResult:
        """Tag what the backends support.

        Raises:
            InputError: A group that must stay together cannot be convex; or a support names an operator of the model
                that was decomposed, and nothing that it became.
        """
        self._check_names(exported_program)
        destinations: dict[str, DelegationSpec] = {}
        rejections: dict[str, Rejection] = {}  # the first one of each operator
        adjustments: list[Adjustment] = []
        moved: set[tuple[str, ...]] = set()  # graphs that a claimed operator calls: they move with it
        for scope in scopes(exported_program):
            if any(scope.path[:i] in moved for i in range(1, len(scope.path) + 1)):
                continue
            groups = [group for support in self.supports.values() for group in support.groups(scope)]
            proposed, who = self._propose(scope, groups), type(self).__name__
            kept, refused, adjusted = capacity.apply(proposed, self.limits, scope, groups=groups, by=who)
            for proposal in kept:
                tag = f"{proposal.backend}_{len(destinations)}"
                destinations[tag] = DelegationSpec(proposal.backend, list(self.compile_specs.get(proposal.backend, ())))
                for node in proposal.nodes:
                    node.meta[graphs.DELEGATION_TAG] = tag
                    moved.update((*scope.path, each.name) for each in graphs.nested_graphs(scope.graph_module, node))
            adjustments += adjusted
            rejections.update((rejection.node, rejection) for rejection in refused)
            self._explain_rest(scope, rejections)
        from executorch.exir.backend.utils import tag_constant_data, tag_mutated_buffer

        tag_constant_data(exported_program)
        if self.own_state:
            tag_mutated_buffer(exported_program)
        return ExplainedResult(exported_program, destinations, tuple(rejections.values()), tuple(adjustments))

    def _check_names(self, program: ExportedProgram) -> None:
        """Refuse a support that names what was decomposed, and takes nothing that it became."""
        if type(self).ops_to_not_decompose is not SupportPartitioner.ops_to_not_decompose:
            return  # which may keep it whole elsewhere
        named = frozenset().union(*(support.operators for support in self.supports.values()))
        if not named:
            return
        every = [(scope, node) for scope in scopes(program) for node in list_computing(scope.graph_module)]
        present = _with_packets(graphs.operator_name(node) for _, node in every)
        absent = named - present - _with_packets(map(graphs.target_name, self.keep_whole))
        became: dict[str, list[tuple[GraphScope, Node]]] = {}
        for scope, node in every if absent and graphs.OUT_OF_SIGHT not in present else ():
            for origin in absent & _with_packets(graphs.origins(node)):
                became.setdefault(origin, []).append((scope, node))
        for backend_id, support in self.supports.items():
            for origin in sorted(support.operators & became.keys() & _decomposed()):
                packet = ".".join(origin.split(".")[:2])
                taken = not _OTHER_FORMS.get(packet, frozenset()).isdisjoint(_with_packets(support.operators))
                if not taken and all(make_check(support, scope)(node) is not None for scope, node in became[origin]):
                    made = " + ".join(dict.fromkeys(graphs.operator_name(node) for _, node in became[origin]))
                    full = origin if origin != packet else f"{origin}.default"
                    raise InputError(
                        f"{type(self).__name__}: {backend_id} supports {origin}, which matches nothing: on the way to "
                        f"Edge dialect it became {made}. Name these, or keep it whole with "
                        f"keep_whole=[torch.ops.{full}]."
                    )

    def _explain_rest(self, scope: GraphScope, rejections: dict[str, Rejection]) -> None:
        """Give each operator of a graph that is left without a reason one."""
        checks = {place: make_check(support, scope) for place, support in self.supports.items()}
        for node in list_computing(scope.graph_module):
            name = graphs.qualified_name(scope.path, node)
            if not graphs.is_operator(node) or graphs.DELEGATION_TAG in node.meta or name in rejections:
                continue
            answers = {backend_id: check(node) for backend_id, check in checks.items()}
            refusals = {backend_id: no for backend_id, no in answers.items() if no is not None}
            first, *others = refusals.values() or [None]
            if len(refusals) < len(answers) or first is None:
                code, text, by = "group", "a node that it must stay together with is not supported", ""
            elif not others:
                code, text, by = first.code, first.text, first.by
            else:
                text = "; ".join(f"{backend_id}: {no.text}" for backend_id, no in refusals.items())
                code, by = first.code, ", ".join(dict.fromkeys(no.by for no in refusals.values()))
            by = by or type(self).__name__
            rejections[name] = Rejection("", name, graphs.operator_name(node), text, by, code)

    def _propose(self, scope: GraphScope, groups: Sequence[Sequence[Node]]) -> Sequence[Proposal]:
        """Return proposals for a graph, in topological order; the groups are nodes that must stay together."""
        return propose_partitions(scope, self.supports, keep_apart=self.keep_apart)

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


class PatternPartitioner(SupportPartitioner):
    """Gives a backend each match of a pattern as a separate partition, and says why the rest stays on the host.

    A pattern that matches nothing in a program causes a warning. For as few partitions as possible, give a
    `SupportPartitioner` a `PatternSupport`.

    Args:
        backend_id: The backend.
        patterns: The patterns.
        compile_specs: The compile specs of each partition.
        limits: How small and how large a partition may be.
        own_state: Whether a buffer that one partition alone reads and writes moves into it; for backends that keep
            state from one call to the next.
        keep_whole: ATen operators, such as `torch.ops.aten.linear.default`, that are not decomposed on the way to Edge
            dialect where a pattern matches them before; the pattern calls them, without example inputs.
        rewrites: As for `SupportPartitioner`.
    """

    def __init__(
        self,
        backend_id: str,
        *patterns: Pattern,
        compile_specs: Sequence[CompileSpec] = (),
        limits: Limits | None = None,
        own_state: bool = False,
        keep_whole: Sequence[Any] = (),
        rewrites: Collection[str] | None = None,
    ) -> None:
        self.support = PatternSupport(*patterns)
        super().__init__(
            {backend_id: self.support},
            compile_specs={backend_id: compile_specs},
            limits=limits,
            own_state=own_state,
            keep_whole=keep_whole,
            rewrites=rewrites,
        )
        self.backend_id = backend_id

    def partition(self, exported_program: ExportedProgram) -> ExplainedResult:
        """Tag the matches of a program, including its nested graphs."""
        self._warn(list(scopes(exported_program)))
        return super().partition(exported_program)

    def _propose(self, scope: GraphScope, groups: Sequence[Sequence[Node]]) -> Sequence[Proposal]:
        """Return the matches in a graph."""
        return [Proposal(self.backend_id, tuple(group)) for group in groups]

    def _warn(self, seen: Sequence[GraphScope]) -> None:
        """Warn about patterns that match nothing in the whole program."""
        matched = frozenset().union(*(self.support.matched(scope) for scope in seen))
        if len(matched) == len(self.support.patterns):
            return
        occurring: set[str] = set()
        made_of: dict[str, dict[str, None]] = {}
        for node in (node for scope in seen for node in list_computing(scope.graph_module)):
            occurring.add(graphs.operator_name(node))
            for origin in graphs.origins(node):
                made_of.setdefault(origin, {})[graphs.operator_name(node)] = None
        for number, pattern in enumerate(self.support.patterns):
            if number not in matched:
                near = next((found[number] for scope in seen if number in (found := self.support.nearest(scope))), None)
                warnings.warn(_nothing(pattern, occurring, made_of, near), UserWarning, stacklevel=3)


_OTHER_FORMS = {
    "aten.linear": frozenset({"aten.addmm", "aten.mm"}),
    "aten.matmul": frozenset({"aten.bmm", "aten.mm"}),
}
"""What an operator becomes in one program, and not in another."""


@cache
def _decomposed() -> frozenset[str]:
    """Return the names of what torch.export decomposes by default."""
    return _with_packets(map(str, default_decompositions()))


def _with_packets(names: Iterable[str]) -> frozenset[str]:
    """Return names of operators, and those for all of their overloads."""
    listed = list(names)
    return frozenset((*listed, *(name.rpartition(".")[0] for name in listed)))


def _nothing(
    pattern: Pattern, occurring: set[str], made_of: Mapping[str, Iterable[str]], near: tuple[str, str] | None
) -> str:
    names = list(dict.fromkeys(" or ".join(names) for names in pattern.operators))
    text = [f"Pattern {pattern.name} ({', '.join(names)}) matches nothing in the program."]
    absent = dict.fromkeys(n for names in pattern.operators if occurring.isdisjoint(names) for n in names)
    for name in absent:
        made = list(made_of.get(name, ()))
        if len(made) > 1:
            text.append(
                f"After decomposition, {name} is {' + '.join(made)}: give the pattern example_inputs, or the "
                f"partitioner keep_whole=[torch.ops.{name}]."
            )
            continue
        # Names are compared without namespaces and overloads, which most names share.
        bare = {other: other.partition(".")[2].partition(".")[0] for other in (name, *sorted(occurring))}
        near_names = difflib.get_close_matches(bare.pop(name), bare.values(), n=2)
        close = [other for key in dict.fromkeys(near_names) for other in bare if bare[other] == key]
        hint = f"; {' and '.join(close)} {'do' if len(close) > 1 else 'does'}" if close else ""
        text.append(f"{name} does not occur in it{hint}.")
    if near is not None:
        text.append(f"It nearly matched at {near[0]}, but {near[1]}.")
    elif not absent:
        text.append("Its operators occur, but not connected as in the pattern, or with other arguments.")
    return " ".join(text)
