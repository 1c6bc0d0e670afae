"""Captured graphs through the compiler's line, and back as functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from executorch.exir import EdgeCompileConfig
from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering._upstream.delegates import LoweredBackendModule
from exir_lowering._upstream.dynamo import outside_tracing
from exir_lowering._upstream.schemas import is_overload
from exir_lowering.dynamo.capture import Captured
from exir_lowering.dynamo.decompositions import restore_pools
from exir_lowering.dynamo.execution import Boxed, assemble
from exir_lowering.dynamo.hazards import NotLowered
from exir_lowering.dynamo.host_calls import has_host_calls
from exir_lowering.dynamo.logs import Kind
from exir_lowering.dynamo.once import Once
from exir_lowering.dynamo.partitions import Lowered, find_executor, make_call
from exir_lowering.dynamo.profit import leaving_losses
from exir_lowering.dynamo.random_numbers import Order, leaving_random, list_random, order_of, restore_order
from exir_lowering.dynamo.weights import Check
from exir_lowering.errors import InvariantError, LoweringError
from exir_lowering.lowered import LoweredMethods
from exir_lowering.options import LoweringOptions
from exir_lowering.pipeline import lower_in, plan
from exir_lowering.plans.lowering_plan import LoweringPlan
from exir_lowering.plans.report import Report
from exir_lowering.plugins.asking import asked_of_forms
from exir_lowering.plugins.backend import Partitioner
from exir_lowering.steps.arguments import RequestedMethod
from exir_lowering.steps.edge import to_edge
from exir_lowering.steps.session import Session


@dataclass(frozen=True, slots=True)
class Target:
    """What graphs are compiled for."""

    partitioners: Mapping[str, Sequence[Partitioner]]  # of each method, in priority order
    backends: Mapping[str, Any]  # by id, before the installed ones
    delegates: Mapping[str, Any]  # by id, before the installed ones
    options: LoweringOptions
    check_weights: Check  # what is compared before each call
    partitions: Literal["profitable", "all"]  # which ones are kept

    def of_kind(self, kind: Kind) -> Target:
        """Return what graphs of a kind are compiled for: those that are not differentiated are rewritten by default."""
        if self.options.rewrites is not None:
            return self
        return replace(self, options=replace(self.options, rewrites="safe" if kind == "inference" else "none"))

    def is_hosted(self, backend_id: str) -> bool:
        """Return whether ExecuTorch's runtime executes a backend's payloads."""
        try:
            return find_executor(backend_id, self.delegates) is None
        except LoweringError:  # what that means is said when it is needed
            return False


@dataclass(frozen=True, slots=True)
class Compiled:
    """Graphs that were lowered together."""

    functions: Mapping[str, Boxed]  # by method, what computes it
    report: Report | None  # None if nothing is computed
    lent: bool  # whether the weights that were lent are constants in it, or something was proven from them
    kept: Any  # what must live as long as the functions


def compile_graphs(captured: Sequence[Captured], target: Target) -> Compiled:
    """Lower graphs together: the partitions of all of them for one backend are one group.

    Weights that are lent stay constants if the partitioners take more with them than with weights as inputs.

    Raises LoweringError as `lower` does, or if a partition cannot be executed here, and NotLowered if the lowered
    program would not be what the graph is.
    """
    if all(one.program is None for one in captured):
        return Compiled({one.name: assemble(one, None, _no_calls) for one in captured}, None, False, None)
    once = Once(target.backends)
    with outside_tracing():
        session, captured, chosen = _prepare(captured, target)
        given = {one.name: one.program for one in captured if one.program is not None}
        lowered = _lower(session, given, chosen, once)
        functions = {one.name: _function(one, lowered, target.delegates) for one in captured}
    _repeat_decisions(captured)
    relied_on = any(method.partitions or method.rewritings for method in lowered.report.methods)
    return Compiled(functions, lowered.report, relied_on and any(one.lent for one in captured), once.used)


def plan_graphs(captured: Sequence[Captured], target: Target) -> LoweringPlan:
    """Return what `compile_graphs` would lower, without calling a backend.

    Raises LoweringError as `plan` does, but a coverage that is required is not asked for.
    """
    if all(one.program is None for one in captured):
        return LoweringPlan(())
    with outside_tracing():
        session, captured, chosen = _prepare(captured, target)
        given = {one.name: one.program for one in captured if one.program is not None}
        return plan(given, chosen, options=_free(session.options))


def _prepare(
    captured: Sequence[Captured], target: Target
) -> tuple[Session, list[Captured], dict[str, list[Partitioner]]]:
    """Return what lowers graphs: the session, the graphs with programs in Edge dialect, and their partitioners."""
    programs = {one.name: one.program for one in captured if one.program is not None}
    chosen = {name: _choose(name, program, target) for name, program in programs.items()}
    for name, program in programs.items():
        restore_pools(program, chosen[name])
    session = Session(_options(programs.values(), target.options))
    whole = target.options.edge_compile_config is not None  # which says itself what is decomposed
    asked = {name: tuple(chosen[name]) if whole else () for name in programs}
    requested = [RequestedMethod(name, programs[name], asked[name], None) for name in programs]
    edge = {method.name: method.program for method in to_edge(requested, session, decomposed=not whole)}
    for name, program in edge.items():
        if list_random(program.graph_module) != list_random(programs[name].graph_module):
            raise NotLowered("other random numbers would be drawn")
    return session, _settle_weights(captured, edge, chosen, session.options), chosen


def _free(options: LoweringOptions) -> LoweringOptions:
    """Return the options for a plan of what is lowered with others."""
    return replace(options, require_coverage=0.0, require_full=False, progress=False)


def _repeat_decisions(captured: Sequence[Captured]) -> None:
    """Let Dynamo guard by what the lowering has decided by symbolic sizes, such as where a partitioner asks for one."""
    for one in captured:
        refused = one.decisions.repeat() if one.decisions is not None else ""
        if refused:
            raise NotLowered(refused)


def _lower(
    session: Session,
    programs: Mapping[str, ExportedProgram],
    partitioners: Mapping[str, Sequence[Partitioner]],
    once: Once,
) -> LoweredMethods:
    """Lower programs so that random numbers are drawn in their order, in smaller partitions if it has to be."""
    orders = {name: order_of(program.graph_module) for name, program in programs.items()}
    lowered = lower_in(session, programs, partitioners, backends=once.backends, preprocess_group=once.preprocess)
    if _restore_orders(lowered, orders):
        return lowered
    apart = {name: [leaving_random(each, apart=True) for each in found] for name, found in partitioners.items()}
    again = Session(session.options)
    lowered = lower_in(again, programs, apart, backends=once.backends, preprocess_group=once.preprocess)
    if not _restore_orders(lowered, orders):
        raise NotLowered("operators that draw random numbers would run in another order")
    return lowered


def _restore_orders(lowered: LoweredMethods, orders: Mapping[str, Order]) -> bool:
    return all(restore_order(lowered[name].graph_module, order) for name, order in orders.items())


def _settle_weights(
    captured: Sequence[Captured],
    edge: Mapping[str, ExportedProgram],
    partitioners: Mapping[str, Sequence[Partitioner]],
    options: LoweringOptions,
) -> list[Captured]:
    """Decide whether lent weights are constants or inputs; return the graphs with their programs in Edge dialect."""
    converted = [replace(one, program=edge.get(one.name)) for one in captured]
    if not any(one.lent for one in captured):
        return converted
    as_inputs = [one.with_weights_as_inputs() if one.program is not None else one for one in converted]
    free = replace(_free(options), rewrites="none")  # which is faster, and says as much
    delegated, total = _count_delegated(as_inputs, partitioners, free)
    if delegated == total or _count_delegated(converted, partitioners, free)[0] <= delegated:
        return as_inputs
    return converted


def _count_delegated(
    captured: Sequence[Captured], partitioners: Mapping[str, Sequence[Partitioner]], options: LoweringOptions
) -> tuple[int, int]:
    """Return how many operators the partitioners take, and of how many."""
    programs = {one.name: one.program for one in captured if one.program is not None}
    # What is not worth it with weights as constants is neither with weights as inputs, and should say so.
    asked = {name: [*map(asked_of_forms, partitioners[name])] for name in programs}
    methods = plan(programs, asked, options=options).methods
    return sum(method.delegated for method in methods), sum(len(method.nodes) for method in methods)


def _choose(method: str, program: ExportedProgram, target: Target) -> list[Partitioner]:
    chosen = list(target.partitioners.get(method, ()))
    if list_random(program.graph_module) or has_host_calls(program.graph_module):
        chosen = [leaving_random(each) for each in chosen]
    required = target.options.require_full or target.options.require_coverage > 0
    if target.partitions == "profitable" and not required:
        chosen = [leaving_losses(each, target.is_hosted, target.options.costs) for each in chosen]
    return chosen


def _options(programs: Iterable[ExportedProgram], options: LoweringOptions) -> LoweringOptions:
    """Return the options of a lowering; AOTAutograd has decomposed what is to be decomposed."""
    if options.edge_compile_config is not None:
        return options
    operators = {
        node.target
        for program in programs
        for _, module in graphs.walk(program.graph_module)
        for node in module.graph.nodes
        if is_overload(node.target)
    }
    config = EdgeCompileConfig(_check_ir_validity=False, preserve_ops=sorted(operators, key=str))
    return replace(options, edge_compile_config=config)


def _function(captured: Captured, lowered: LoweredMethods, delegates: Mapping[str, Any]) -> Boxed:
    program = lowered.get(captured.name) if captured.program is not None else None
    numbers: dict[int, int] = {}

    def call(module: LoweredBackendModule) -> Any:
        number = numbers.setdefault(id(module), len(numbers))
        return make_call(Lowered(captured.name, number, module), delegates)

    return assemble(captured, program, call)


def _no_calls(module: LoweredBackendModule) -> Any:
    raise InvariantError("A graph without a program calls a partition. Please report this function.")
