"""Lower captured graphs with the compiler's line, and make them callable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering._upstream.compiler import EdgeCompileConfig
from exir_lowering._upstream.dynamo import outside_tracing
from exir_lowering._upstream.operators import is_overload
from exir_lowering.dynamo.capture import Captured
from exir_lowering.dynamo.compiled import Boxed, compile_graph, is_hosted
from exir_lowering.dynamo.in_pytorch import is_host_call, is_random, list_random, order_of, restore_order
from exir_lowering.dynamo.logs import Kind, NotLowered
from exir_lowering.dynamo.once import Once
from exir_lowering.dynamo.options import Attempt, requires_coverage
from exir_lowering.dynamo.partitioning import ApartByRandom, LeavingLosses, LeavingRandom
from exir_lowering.errors import ignoring_errors
from exir_lowering.lowered import LoweredMethods
from exir_lowering.options import LoweringOptions
from exir_lowering.pipeline import lower_in, plan
from exir_lowering.plans.report import Report
from exir_lowering.plugins.asking import asked_of_forms
from exir_lowering.plugins.backend import Partitioner
from exir_lowering.steps.arguments import RequestedMethod
from exir_lowering.steps.edge import to_edge
from exir_lowering.steps.session import Session

Partitioners = Mapping[str, Sequence[Partitioner]]  # by method, in priority order


def compile_graphs(
    kind: Kind, captured: Sequence[Captured], attempt: Attempt
) -> tuple[Mapping[str, Boxed], Report | None, bool]:
    """Lower graphs together, whose first is of a kind; LoweringError as `lower`, or NotLowered if they change.

    Return what computes each; the report, if anything is computed; and whether anything rests on what was baked in.
    """
    delegates = attempt.options.delegates
    if all(one.program is None for one in captured):
        return {one.name: compile_graph(one, None, delegates) for one in captured}, None, False
    once = Once()
    with outside_tracing():
        session, captured, chosen = _prepare(kind, captured, attempt)
        lowered = _lower(session, _programs(captured), chosen, once)
        compiled = {one.name: compile_graph(one, lowered.get(one.name), delegates, once.used) for one in captured}
    for one in captured:
        # Dynamo has to guard by what symbolic sizes decided, such as where a partitioner asked for one.
        refused = one.decisions.repeat() if one.decisions is not None else ""
        if refused:
            raise NotLowered(refused)
    relied_on = any(method.partitions or method.rewritings for method in lowered.report.methods)
    return compiled, lowered.report, relied_on and any(one.baked for one in captured)


def _programs(captured: Iterable[Captured]) -> dict[str, ExportedProgram]:
    return {one.name: one.program for one in captured if one.program is not None}


def _prepare(
    kind: Kind, captured: Sequence[Captured], attempt: Attempt
) -> tuple[Session, list[Captured], dict[str, list[Partitioner]]]:
    """Return what lowers graphs: the session, the graphs with programs in Edge dialect, and their partitioners."""
    programs = _programs(captured)
    chosen = {name: _choose(name, program, attempt) for name, program in programs.items()}
    for name, program in programs.items():
        _restore_pools(program, chosen[name])
    given = attempt.options.lowering
    session = Session(_options(kind, programs.values(), given), attempt.backends)
    whole = given.edge_compile_config is not None  # which says itself what is decomposed
    requested = [RequestedMethod(name, programs[name], tuple(chosen[name]) if whole else (), None) for name in programs]
    edge = {method.name: method.program for method in to_edge(requested, session, decomposed=not whole)}
    for name, program in edge.items():
        if list_random(program.graph_module) != list_random(programs[name].graph_module):
            raise NotLowered("other random numbers would be drawn")
    return session, _settle_weights(captured, edge, chosen, session.options), chosen


def _choose(method: str, program: ExportedProgram, attempt: Attempt) -> list[Partitioner]:
    options = attempt.options
    chosen = list(attempt.partitioners.get(method, ()))
    if any(is_random(node) or is_host_call(node) for _, node in graphs.every_node(program.graph_module)):
        chosen = [LeavingRandom.of(each) for each in chosen]
    if options.partitions == "profitable" and not requires_coverage(options):
        hosted = partial(is_hosted, delegates=options.delegates)
        chosen = [LeavingLosses.of(each, hosted) for each in chosen]
    return chosen


def _options(kind: Kind, programs: Iterable[ExportedProgram], options: LoweringOptions) -> LoweringOptions:
    """Return the options of a lowering; AOTAutograd has decomposed what is to be decomposed."""
    if options.rewrites is None:
        options = replace(options, rewrites="safe" if kind == "inference" else "none")
    if options.edge_compile_config is not None:
        return options
    operators = {
        node.target
        for program in programs
        for _, node in graphs.every_node(program.graph_module)
        if is_overload(node.target)
    }
    config = EdgeCompileConfig(_check_ir_validity=False, preserve_ops=sorted(operators, key=str))
    # What is not worth a lowering is executed by torch, whatever kernels there are for it.
    return replace(options, edge_compile_config=config, unsupported="allow")


def _settle_weights(
    captured: Sequence[Captured],
    edge: Mapping[str, ExportedProgram],
    partitioners: Partitioners,
    options: LoweringOptions,
) -> list[Captured]:
    """Return graphs in Edge dialect; weights stay baked in if the partitioners take more so than with inputs."""
    converted = [replace(one, program=edge.get(one.name)) for one in captured]
    if not any(one.baked for one in captured):
        return converted
    as_inputs = [one.with_weights_as_inputs() for one in converted]
    # Without rewrites, which is faster, and says as much.
    free = replace(options, require_coverage=0.0, progress=False, rewrites="none")
    delegated, total = _count_delegated(as_inputs, partitioners, free)
    if delegated == total or _count_delegated(converted, partitioners, free)[0] <= delegated:
        return as_inputs
    return converted


def _count_delegated(
    captured: Sequence[Captured], partitioners: Partitioners, options: LoweringOptions
) -> tuple[int, int]:
    """Return how many operators the partitioners take, and of how many."""
    programs = _programs(captured)
    # What is not worth it with weights as constants is neither with weights as inputs, and should say so.
    chosen = {name: [*map(asked_of_forms, partitioners[name])] for name in programs}
    methods = plan(programs, chosen, options=options).methods
    return sum(method.delegated for method in methods), sum(len(method.nodes) for method in methods)


def _lower(
    session: Session, programs: Mapping[str, ExportedProgram], partitioners: Partitioners, once: Once
) -> LoweredMethods:
    """Lower programs so that random numbers are drawn in their order, in smaller partitions if it has to be."""
    orders = {name: order_of(program.graph_module) for name, program in programs.items()}
    apart = {name: [ApartByRandom.of(each) for each in found] for name, found in partitioners.items()}
    for chosen in (partitioners, apart):
        own = Session(session.options, session.backends) if chosen is apart else session
        lowered = lower_in(own, programs, chosen, preprocess_group=once.preprocess)
        if all(restore_order(lowered[name].graph_module, order) for name, order in orders.items()):
            return lowered
    raise NotLowered("operators that draw random numbers would run in another order")


_POOL, _WITH_INDICES = torch.ops.aten.max_pool2d.default, torch.ops.aten.max_pool2d_with_indices.default


def _restore_pools(program: ExportedProgram, partitioners: Sequence[Partitioner]) -> None:
    """Replace max poolings, whose indices nobody reads, by plain ones if a partitioner wants these whole."""
    pools = [node for node in program.graph.nodes if node.target is _WITH_INDICES and node.users]
    pools = [pool for pool in pools if all(graphs.is_getitem(user) and user.args[1] == 0 for user in pool.users)]
    wanted = pools and any(_wants_pools(partitioner, program) for partitioner in partitioners)
    for pool in pools if wanted else ():
        for value in [*pool.users]:
            # It keeps its name, by which it may be returned.
            value.target, value.args, value.kwargs = _POOL, pool.args, pool.kwargs
            value.meta = {**pool.meta, **value.meta}
        program.graph.erase_node(pool)


def _wants_pools(partitioner: Partitioner, program: ExportedProgram) -> bool:
    with ignoring_errors():  # it stays as it is: nothing is decomposed here, so it need not know an answer
        wanted, _ = partitioner.ops_to_not_decompose(program)
        return _POOL in (wanted or ())
    return False
