"""The compiler: edge -> rewrite -> tag -> extract -> legalize -> plan -> group -> preprocess -> splice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering._upstream import locks, pins
from exir_lowering._upstream.compiler import EdgeProgramManager  # sorts before all that import ExecuTorch's compiler
from exir_lowering._upstream.delegates import LoweredBackendModule
from exir_lowering.errors import InputError
from exir_lowering.fast import accelerated
from exir_lowering.graphs import collector
from exir_lowering.graphs.copies import own_state, private_copy
from exir_lowering.lowered import LoweredMethods
from exir_lowering.model import (
    BackendGroup,
    CallSite,
    EdgeMethod,
    ExtractedMethod,
    LoweredPartition,
    Partition,
    State,
    TaggedMethod,
)
from exir_lowering.options import LoweringOptions, read_size
from exir_lowering.plans.lowering_plan import LoweringPlan, require_coverage
from exir_lowering.plans.planned import Later, MethodPlan
from exir_lowering.plans.planning import plan_method
from exir_lowering.plans.report import Report
from exir_lowering.plugins import asking, availability, registry
from exir_lowering.plugins.backend import Backend, CompileSpec, PartitionerLike
from exir_lowering.plugins.rewrite import Rewrite
from exir_lowering.steps import arguments, export_mistakes, invariants
from exir_lowering.steps.arguments import Request, TransformPasses, describe_families
from exir_lowering.steps.cached import preprocess_cached
from exir_lowering.steps.control_flow import check_emitted
from exir_lowering.steps.conversion_context import converting
from exir_lowering.steps.edge import as_edge, to_edge
from exir_lowering.steps.emit import plan_memory
from exir_lowering.steps.extract import extract
from exir_lowering.steps.legalize import ROUNDS, legalize, list_refused, require_legal
from exir_lowering.steps.limits import limit
from exir_lowering.steps.preprocess import preprocess
from exir_lowering.steps.provenance import describe, list_narrowed, versions
from exir_lowering.steps.recovery import Partitioned, lower_groups
from exir_lowering.steps.rewrite import rewrite
from exir_lowering.steps.session import Backends, Session
from exir_lowering.steps.shared_state import elsewhere, list_states, placed
from exir_lowering.steps.splice import delegate, splice
from exir_lowering.steps.tag import Treatment, known_failures, retag, tag
from exir_lowering.steps.trials import advise

Programs = Mapping[str, ExportedProgram]
Sizes = Sequence[Mapping[str, int]] | Mapping[str, Sequence[Mapping[str, int]]] | None
PreprocessGroup = Callable[[BackendGroup, Backend, Session], list[LoweredPartition]]


def lower(
    programs: ExportedProgram | Programs | EdgeProgramManager,
    partitioners: PartitionerLike = None,
    *,
    backends: Backends | None = None,
    options: LoweringOptions | None = None,
    transform_passes: TransformPasses = None,
    variants: Mapping[str, PartitionerLike] | None = None,
    sizes: Sizes = None,
) -> LoweredMethods:
    """Lower programs from `torch.export`, or in Edge dialect, to delegates.

    Args:
        programs: One program (it becomes the method "forward"), a program per method name, or ExecuTorch's
            EdgeProgramManager, whose constant methods are emitted too. None of them is changed.
        partitioners: An ExecuTorch `Partitioner`, the name of an installed one, a sequence of these in priority order,
            or a mapping from method names to any of these. Methods that a mapping leaves out stay on the host, as do
            all methods when it is None.
        backends: Backends by id, which are looked up before the installed ones: `Backend` objects or classes, or
            ExecuTorch `BackendDetails` classes.
        options: How to lower; `LoweringOptions()` by default.
        transform_passes: Passes that run over the programs in Edge dialect before a partitioner sees them, as
            `to_edge_transform_and_lower` has them: a sequence of passes or one of ExecuTorch's managers of passes, for
            all methods; or a mapping from method names to sequences of passes.
        variants: In place of partitioners: what to lower each program for several times, by the name of the variant,
            the preferred one first. `{"npu": [npu, "xnnpack"], "cpu": "xnnpack"}` makes the methods `forward@npu` and
            `forward@cpu`; the file says which of them needs which backends, and whoever runs it chooses.
        sizes: The largest inputs, as sets of sizes that dynamic dimensions have together:
            `[{"seq": 16, "batch": 64}, {"seq": 512, "batch": 2}]`, by the names that `options.bounds` takes. Memory is
            planned for the largest of them, instead of for the greatest size of each dimension. Or by method.

    Returns:
        The lowered programs by method, with a report; `.emit()` makes the `.pte`.

    Raises:
        InputError: A program, method name or option is invalid, or a transform pass failed.
        UnknownPluginError: A partitioner name or backend id is not known.
        PluginLoadError: A plug-in is broken or provided twice.
        PartitionerContractError: A partitioner raised, or did more or less than tagging.
        RewriteContractError: A rewrite raised, or did not give an equal value.
        BackendFailure: A backend raised.
        BackendContractError: A backend returned something wrong, or wrote into a weight.
        CoverageError: Less is delegated than the options require; no backend was called.
        MemoryRequirementError: A method takes more memory than the options allow; no backend was called.
    """
    session = Session(arguments.check_options(options), backends)
    lowered = lower_in(
        session, programs, partitioners, transform_passes=transform_passes, variants=variants, sizes=sizes
    )
    availability.warn_unavailable(lowered.report.backend_ids)
    export_mistakes.warn(lowered.report.warnings)
    return lowered


def lower_in(
    session: Session,
    programs: ExportedProgram | Programs | EdgeProgramManager,
    partitioners: PartitionerLike = None,
    *,
    transform_passes: TransformPasses = None,
    variants: Mapping[str, PartitionerLike] | None = None,
    sizes: Sizes = None,
    preprocess_group: PreprocessGroup = preprocess_cached,
    treatment: Treatment | None = None,
) -> LoweredMethods:
    """Lower programs as `lower` does; who executes them here asks what is available itself, so nothing warns of it."""
    request = arguments.read_request(programs, partitioners, transform_passes, variants)
    chosen = arguments.choose_rewrites(session.options, default="safe")
    with session.progress, collector.heap_frozen():
        given = to_edge(limit(request.methods, session.options.bounds, sizes), session)
        return _lower(given, chosen, request, session, preprocess_group, treatment)


def plan(
    programs: ExportedProgram | Programs | EdgeProgramManager,
    partitioners: PartitionerLike = None,
    *,
    options: LoweringOptions | None = None,
    transform_passes: TransformPasses = None,
    variants: Mapping[str, PartitionerLike] | None = None,
    sizes: Sizes = None,
) -> LoweringPlan:
    """Return what `lower` would do with these programs and partitioners, without calling a backend.

    The partitioners run, and their partitions are taken from the programs, as in `lower`; the backends need not be
    installed.

    Args:
        programs: As for `lower`. None of them is changed.
        partitioners: As for `lower`.
        options: As for `lower`.
        transform_passes: As for `lower`.
        variants: As for `lower`.
        sizes: As for `lower`.

    Returns:
        For each method its partitions and its memory, and for each operator that stays on the host the reason.

    Raises:
        InputError, UnknownPluginError, PluginLoadError, PartitionerContractError, RewriteContractError: As for `lower`.
        CoverageError: Less is delegated than the options require; the error has the plan.
        MemoryRequirementError: A method takes more memory than the options allow.
    """
    session = Session(arguments.check_options(options))
    request = arguments.read_request(programs, partitioners, transform_passes, variants)
    rewrites = arguments.choose_rewrites(session.options, default="safe")
    with session.progress, collector.heap_frozen():
        given = to_edge(limit(request.methods, session.options.bounds, sizes), session)
        with converting((one.program for one in given), gradients=True, fast=session.options.fast):
            states = list_states(given)
            methods = rewrite(given, rewrites, session, states)
            legal, extracted, planned = _partition_all(methods, states, session)
            planned = plan_memory(legal, extracted, planned, session.options)

    def attempt(method: EdgeMethod, assume: Mapping[str, str]) -> MethodPlan:
        assumed = {**session.options.assume, **assume}
        own = Session(replace(session.options, assume=assumed, require_coverage=0.0, progress=False))
        with converting([method.program], gradients=True, fast=own.options.fast):
            tried = rewrite([method], rewrites, own, states) if assume else (method,)
            return _partition_all(tried, states, own)[2].methods[0]

    def tried(given: EdgeMethod, method: EdgeMethod, one: MethodPlan) -> MethodPlan:
        return replace(one, _advice=Later(lambda: {one.name: advise(given, method, one, attempt)}))

    export_mistakes.warn(planned.warnings)
    return replace(planned, methods=tuple(map(tried, given, methods, planned.methods)))


def to_backend(
    method_to_program: ExportedProgram | Programs | EdgeProgramManager,
    method_to_partitioner: PartitionerLike,
    *,
    backends: Backends | None = None,
    options: LoweringOptions | None = None,
) -> LoweredMethods:
    """Lower programs that are in Edge dialect already, as they are; otherwise like `lower`.

    Nothing is rewritten unless `options.rewrites` says so.

    Args:
        method_to_program: As `programs` of `lower`.
        method_to_partitioner: As `partitioners` of `lower`.
        backends: As for `lower`.
        options: As for `lower`.

    Returns:
        As `lower`.

    Raises:
        InputError: Also when a program is not in Edge dialect. The other errors are those of `lower`.
    """
    session = Session(arguments.check_options(options), backends)
    request = arguments.read_request(method_to_program, method_to_partitioner)
    rewrites = arguments.choose_rewrites(session.options, default="none")
    given = as_edge(limit(request.methods, session.options.bounds))
    with session.progress:
        lowered = _lower(given, rewrites, request, session)
    availability.warn_unavailable(lowered.report.backend_ids)
    return lowered


def lower_whole_program(
    program: ExportedProgram,
    backend_id: str,
    compile_specs: Sequence[CompileSpec] = (),
    *,
    backends: Backends | None = None,
) -> LoweredBackendModule:
    """Lower a whole Edge program to one backend, without a partitioner.

    Args:
        program: The program, in Edge dialect. It is not changed.
        backend_id: The backend.
        compile_specs: The compile specs for the backend.
        backends: Backends by id, which are looked up before the installed ones.

    Returns:
        ExecuTorch's module with the payload; it can be called from a module that is then exported, or emitted alone.

    Raises:
        InputError: The program is not an ExportedProgram in Edge dialect, or the id or a compile spec is
            invalid.
        UnknownPluginError, PluginLoadError, BackendFailure, BackendContractError: As for `lower`.
    """
    arguments.require_edge("forward", arguments.check_program("lower_whole_program", program))
    arguments.check_destination("lower_whole_program", backend_id, compile_specs)
    session = Session(LoweringOptions(), backends)
    backend = registry.find_backend(backend_id, backends)
    site = CallSite("forward", (), "")
    with converting([program], gradients=True):
        copied = private_copy(program, handles=True)
    whole = Partition("forward", "forward", "", backend_id, tuple(compile_specs), copied, site)
    (lowered,) = preprocess(BackendGroup(backend_id, (whole,)), backend, session)
    availability.warn_unavailable([backend_id])
    return delegate(lowered)


def _lower(
    given: Sequence[EdgeMethod],
    rewrites: Sequence[Rewrite],
    request: Request,
    session: Session,
    preprocess_group: PreprocessGroup = preprocess_cached,
    treatment: Treatment | None = None,
) -> LoweredMethods:
    """Lower methods in Edge dialect: the line."""
    options = session.options
    with collector.heap_frozen() as set_aside:
        with converting((one.program for one in given), gradients=True, fast=options.fast), accelerated(options.fast):
            methods = rewrite(given, rewrites, session, states := list_states(given))

        def partition(methods: Sequence[EdgeMethod], treatment: Treatment | None) -> Partitioned:
            with converting((one.program for one in methods), gradients=True, fast=options.fast):
                methods, extracted, planned = _partition_all(methods, states, session, treatment)
                if options.require_memory is not None:
                    with suppress(InputError):  # of what has no default way to be emitted: `emit` checks it
                        planned = plan_memory(methods, extracted, planned, options)
                families = describe_families({one.name: one.program for one in extracted}, request.buckets)
                programs = ((method.program, *(one.program for one in method.partitions)) for method in extracted)
                own_state(itertools.chain.from_iterable(programs))
            set_aside()
            groups = _group(extracted)
            called = {group.backend_id: registry.find_backend(group.backend_id, session.backends) for group in groups}
            return Partitioned(methods, tuple(extracted), planned, tuple(groups), called, families)

        def lower_group(group: BackendGroup, backend: Backend) -> list[LoweredPartition]:
            with session.timed("preprocess"):
                return preprocess_group(group, backend, session)

        found = partition(methods, treatment)
        found, results, refused = lower_groups(options.on_backend_error, found, partition, lower_group)
        methods, planned = found.methods, found.planned
        with session.timed("splice"), locks.conversion():
            lowered = splice(found.extracted, {one.partition.id: one for one in results})
            made_by, narrowed = describe(methods, found.backends, planned, options), list_narrowed(methods, lowered)
    report = Report(
        planned.methods,
        {one.partition.id: len(one.result.processed_bytes) for one in results},
        dict(session.times.seconds),
        {method.name: method.left_to_executorch for method in methods if method.left_to_executorch},
        tuple(session.cache.uses),
        pins.report_switched_off(),
        states=planned.states,
        versions=planned.versions,
        warnings=planned.warnings,
        refused=refused,
        narrowed=narrowed,
    )
    return LoweredMethods(
        lowered,
        report,
        {method.name: method.program for method in methods},
        {**request.constant_methods, **found.families},
        options.fast,
        in_place=any(method.rewrites for method in methods),
        unchanged={method.name: method.unchanged for method in methods if method.unchanged is not None},
        made_by=made_by,
        memory_planner=options.memory_planner,
        require_memory=read_size(options.require_memory),
    )


def _partition_all(
    methods: Sequence[EdgeMethod], states: Sequence[State], session: Session, treatment: Treatment | None = None
) -> tuple[tuple[EdgeMethod, ...], list[ExtractedMethod], LoweringPlan]:
    """Tag and extract every method, and record the decisions: everything that happens before a backend is called."""
    legal, extracted, plans, refused, claims = [], [], [], [], []
    for method in session.progress.each("partition", methods):
        shared = elsewhere(states, method.name)
        for left in reversed(range(ROUNDS + 1)):  # again where the host gets other operators that run
            tagged, partitioned = _partition(method, shared, session, treatment)
            illegal = list_refused(partitioned.program, session.target)
            changed = legalize(method, illegal, session) if left else None
            if changed is None:
                break
            method = changed
        if method.converted_from is not None:
            check_emitted(method.name, partitioned.program)
        refused.append((method, partitioned, illegal))
        legal.append(method)
        extracted.append(partitioned)
        claims.append((method, tagged))
        with session.timed("plan"), collector.paused():
            plans.append(plan_method(method, tagged, partitioned))
    require_legal(refused, session)
    mistakes = export_mistakes.list_mistakes(legal)
    found = placed(states, claims, extracted)
    planned = LoweringPlan(tuple(plans), states=found, versions=versions(), warnings=mistakes)
    require_coverage(planned, session.options)
    return tuple(legal), extracted, planned


def _partition(
    edge: EdgeMethod, shared: frozenset[str], session: Session, treatment: Treatment | None
) -> tuple[list[TaggedMethod], ExtractedMethod]:
    """Tag and extract, once per partitioner: what an earlier one claimed is a delegate call for the later ones."""
    tagged: list[TaggedMethod] = []
    method = ExtractedMethod(edge.name, private_copy(edge.program, handles=True), ())
    if not edge.partitioners:
        graphs.strip_tags(method.program.graph_module)
        return tagged, method
    state, non_convex = asking.make_fake_state(method.program), session.options.non_convex
    strict = session.options.on_backend_error == "raise"
    for partitioner in edge.partitioners:
        with session.timed("tag"), accelerated(session.options.fast):
            claimed = tag(edge.name, method.program, partitioner, state, strict=strict)
            for taken_away in (known_failures(claimed, session.backends), treatment):
                if taken_away is not None:
                    claimed, non_convex = retag(claimed, taken_away), "split"  # around it
            tagged.append(claimed)
        with session.timed("extract"), collector.paused():
            step = extract(tagged[-1], earlier=len(method.partitions), non_convex=non_convex, shared=shared)
            invariants.check_extracted(step)
        partitions, rejections = method.partitions + step.partitions, method.rejections + step.rejections
        method = ExtractedMethod(edge.name, step.program, partitions, rejections)
    return tagged, method


def _group(methods: Iterable[ExtractedMethod]) -> list[BackendGroup]:
    """Group the partitions of all methods by backend, in the order in which backends first occur."""
    found: dict[str, list[Partition]] = {}
    for partition in itertools.chain.from_iterable(method.partitions for method in methods):
        found.setdefault(partition.backend_id, []).append(partition)
    return [BackendGroup(backend_id, tuple(partitions)) for backend_id, partitions in found.items()]
