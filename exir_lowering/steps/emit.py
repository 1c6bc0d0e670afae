"""Step emit: from lowered programs to one `.pte` file and its data files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering._upstream import locks
from exir_lowering._upstream.compiler import ExecutorchBackendConfig, ExecutorchProgramManager
from exir_lowering._upstream.delegates import add_named_data, forgetting_delegates, named_data
from exir_lowering._upstream.edge import EdgeProgramManager, edge_record, without_validity_checks
from exir_lowering._upstream.emission import EmittedCall, data_file_contents, emitting, pte_contents
from exir_lowering._upstream.fakes import ranges_in_file
from exir_lowering._upstream.programs import fake_mode_of
from exir_lowering._upstream.runtime import import_quantized_kernels
from exir_lowering.errors import InputError, LoweringError
from exir_lowering.fast import accelerated
from exir_lowering.graphs import collector, debug_handles, treespecs
from exir_lowering.graphs.copies import private_copy
from exir_lowering.model import BackendGroup, CallSite, EdgeMethod, ExtractedMethod, Partition
from exir_lowering.options import LoweringOptions, MemoryPlanner, read_size
from exir_lowering.plans.lowering_plan import LoweringPlan, require_memory
from exir_lowering.plans.planned import LaterMemory, MethodPlan, PlannedMemory
from exir_lowering.plans.report import Report
from exir_lowering.plugins import registry
from exir_lowering.pte import manifest, saving
from exir_lowering.pte.debug_info import SUFFIX, VERSION, DebugInfo, MethodDebug
from exir_lowering.pte.payloads import ORIGINALS, original_key
from exir_lowering.pte.provenance import KEY, Provenance
from exir_lowering.steps import edge_errors, placement, sealing, shared_state
from exir_lowering.steps.control_flow import check_emitted
from exir_lowering.steps.conversion_context import converting
from exir_lowering.steps.debug_recording import record
from exir_lowering.steps.emittable import make_emittable
from exir_lowering.steps.host_memory import check_inputs, copy_where_misread, plan_as_written
from exir_lowering.steps.legalizing.plain import compute_plainly
from exir_lowering.steps.memory_planning import Planning, configure, plans_results
from exir_lowering.steps.placement import StoredData
from exir_lowering.steps.preprocess import preprocess
from exir_lowering.steps.provenance import complete, narrowed_further
from exir_lowering.steps.session import Session
from exir_lowering.steps.shared_state import ShareState
from exir_lowering.steps.write_back import write_back

_SHOWN = 8  # how many of the largest entries `print(artifact)` shows


@dataclass(frozen=True, slots=True, eq=False)
class Artifact:
    """A file that ExecuTorch's runtime loads.

    Attributes:
        manager: ExecuTorch's manager of the emitted program.
        report: The report of the lowering, with the memory that is planned for each method.
        stored: What the file and its data files store, and how many bytes each item takes, the largest first.
        methods: What the debug handles of each method stand for.
        etrecord: ExecuTorch's `ETRecord` for its Inspector; None unless `emit` was asked for it.
    """

    manager: ExecutorchProgramManager
    report: Report
    stored: tuple[StoredData, ...]
    methods: Mapping[str, MethodDebug] = field(default_factory=dict)
    etrecord: Any = None

    @property
    def buffer(self) -> bytes:
        """The `.pte` file in memory, made again at each access; `save` does not need it."""
        return bytes(pte_contents(self.manager))

    @property
    def data_files(self) -> dict[str, bytes]:
        """The `.ptd` data files by name, made again at each access; empty if all data is in the `.pte` file."""
        return {sealing.data_name(name): bytes(cord) for name, cord in data_file_contents(self.manager).items()}

    @property
    def debug_info(self) -> DebugInfo:
        """What the debug handles in the file stand for, with what identifies the file."""
        return DebugInfo(VERSION, sealing.identity(self.manager), self.methods)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the `.pte` file, with its data files and debug information next to it, piece by piece.

        The debug information of `model.pte` is `model.debug.json`; the record for ExecuTorch's Inspector, if there is
        one, `model.etrecord`.

        All files are complete before the first one is moved to its final name, and the `.pte` file is the last. After
        an interruption, the files are those of the old program or of the new one, or an old program with a new data
        file of the same name, which `load` refuses.

        Args:
            path: Where the `.pte` file goes. An existing file is replaced once the new one is complete.
                If it is a link, the link stays, and the file that it points to is replaced.

        Returns:
            The path.

        Raises:
            InputError: The path does not end in `.pte`, or cannot be written.
        """
        target = saving.pte_path(path)
        data = data_file_contents(self.manager)
        files = {target.parent / sealing.data_name(name): cord.write_to_file for name, cord in data.items()}
        files[target] = self.manager.write_to_file
        if self.etrecord is not None:
            files[target.with_suffix(".etrecord")] = partial(_write_record, self.etrecord)
        try:
            if self.methods:
                debug = self.debug_info.to_json().encode()
                files[target.with_suffix(SUFFIX)] = lambda file: file.write(debug)
            saving.replace_files(files, target)
        except OSError as error:
            raise InputError(f"Cannot save to {str(target)!r}: {error}") from error
        return target

    def __str__(self) -> str:
        lines = [repr(self)]
        lines += [
            f"  {datum.bytes:,} B: {datum.kind} {datum.key} in {datum.file or 'the .pte file'}"
            + (f" ({datum.note})" if datum.note else "")
            for datum in self.stored[:_SHOWN]
        ]
        if len(self.stored) > _SHOWN:
            lines.append(f"  and {len(self.stored) - _SHOWN} more entries of `stored`")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Artifact({', '.join(sorted(self.manager.methods))})"


@dataclass(frozen=True, slots=True)
class EmitOptions:
    """How to emit; `LoweredMethods.emit` says what each of them means."""

    config: ExecutorchBackendConfig | None = None
    constant_methods: Mapping[str, Any] | None = None
    external_weights: placement.Policy | None = None
    keep_originals: bool = False
    etrecord: bool = False
    share_state: ShareState = "auto"
    provenance: bool = True
    reserved: Mapping[str, bytes] = field(default_factory=dict)  # what a module puts into the file's last segments


@dataclass(frozen=True, slots=True, eq=False)
class Lowered:
    """What a lowering made, for the file; `LoweredMethods` says what each field is."""

    programs: Mapping[str, ExportedProgram]
    report: Report
    edge_programs: Mapping[str, ExportedProgram] = field(default_factory=dict)
    constant_methods: Mapping[str, Any] = field(default_factory=dict)
    fast: bool = True
    in_place: bool = False
    unchanged: Mapping[str, ExportedProgram] = field(default_factory=dict)
    made_by: Provenance = field(default_factory=Provenance)
    memory_planner: MemoryPlanner = "greedy"
    require_memory: int | None = None


def emit(lowered: Lowered, options: EmitOptions) -> Artifact:
    """Emit lowered programs, which are not changed."""
    with _emitting(lowered):
        artifact = _emit(lowered, options)
    sealing.seal(artifact.manager)  # it reads all that was emitted, while other threads convert
    return artifact


def plan_memory(
    methods: Sequence[EdgeMethod], extracted: Sequence[ExtractedMethod], planned: LoweringPlan, options: LoweringOptions
) -> LoweringPlan:
    """Return a plan with the memory that `emit()` will plan: checked now if there is a limit, else when it is asked."""
    lowered = Lowered(
        {method.name: method.program for method in extracted},
        Report(planned.methods, {}, {}, states=planned.states),
        fast=options.fast,
        in_place=any(method.rewrites for method in methods),
        memory_planner=options.memory_planner,
        require_memory=read_size(options.require_memory),
    )
    if options.require_memory is not None:
        known = _plan_memory(lowered)
        return replace(planned, methods=_with_memory(planned, lambda: known))

    def find() -> dict[str, PlannedMemory]:
        with suppress(InputError):  # without a configuration, they cannot be emitted
            return _plan_memory(lowered)
        return {}

    return replace(planned, methods=_with_memory(planned, find))


def _with_memory(planned: LoweringPlan, plan: Callable[[], Mapping[str, PlannedMemory]]) -> tuple[MethodPlan, ...]:
    memory = LaterMemory(plan)
    return tuple(replace(method, _memory=memory) for method in planned.methods)


def _plan_memory(lowered: Lowered) -> dict[str, PlannedMemory]:
    """Emit copies of partitioned programs, without payloads, for what is planned on the way."""
    with _emitting(lowered):
        report = _emit(lowered, EmitOptions(provenance=False)).report
    return {method.name: method.memory for method in report.methods if method.memory is not None}


@contextmanager
def _emitting(lowered: Lowered) -> Iterator[None]:
    # Without gradients: ExecuTorch executes the writes into buffers, which autograd refuses for values that need one.
    context = converting(lowered.programs.values(), gradients=False, fast=lowered.fast)
    with locks.conversion(), collector.heap_frozen(), context, accelerated(lowered.fast):
        yield


def _emit(lowered: Lowered, options: EmitOptions) -> Artifact:
    programs, constant_methods = lowered.programs, _constant_methods(lowered, options)
    config = configure(options.config or ExecutorchBackendConfig(), lowered.memory_planner)
    states = shared_state.choose(lowered.report.states, options.share_state, config.memory_planning_pass)
    shared_state.check(programs, states)
    for name, program in programs.items():
        check_inputs(name, program)
        check_emitted(name, program)
    copies = {name: _copy(name, program, config, in_place=lowered.in_place) for name, program in programs.items()}
    if options.keep_originals:
        _attach_originals(copies)
    _import_kernels(copies)
    if options.external_weights is not None:
        placement.place(copies, config, options.external_weights)
    if any(state.shared for state in states):
        config = shared_state.share(copies, states, config)
    emitted_from = [*programs.values(), *copies.values()]
    variants = edge_errors.OutVariants(make_emittable(plan_as_written(config.to_out_var_pass)))
    planning = Planning(config, list(copies))
    try:
        with forgetting_delegates(emitted_from), accelerated(lowered.fast, "emit"):
            edge = EdgeProgramManager(copies, constant_methods, without_validity_checks())
            with sealing.reserving(edge, options.reserved, options.provenance), emitting() as emitted:
                own = replace(config, to_out_var_pass=variants, memory_planning_pass=planning)
                manager = edge.to_executorch(own)
    except MemoryError:
        raise
    except Exception as error:
        raise edge_errors.explain_emission(programs, error, variants) from error
    memory = planning.describe()
    narrowed = narrowed_further(lowered.report.narrowed, programs, copies)
    methods = _with_memory(lowered.report, lambda: memory)
    report = replace(lowered.report, states=states, narrowed=narrowed, methods=methods)
    require_memory(memory, lowered.require_memory)
    if options.keep_originals:
        _check_numbers(programs, manager)
    etrecord = _etrecord(lowered.edge_programs, manager, emitted.methods) if options.etrecord else None
    sealing.share(manager, config)
    if options.provenance:
        sealing.fill(manager, KEY, complete(lowered.made_by, programs, emitted.values, options).encode())
    stored = placement.list_stored(copies, config, manager)
    debug = record(programs, emitted.methods, lowered.unchanged)
    return Artifact(manager, report, stored, debug, etrecord)


def _copy(name: str, program: ExportedProgram, config: ExecutorchBackendConfig, *, in_place: bool) -> ExportedProgram:
    """Return a copy to emit, as ExecuTorch rewrites the graphs that it emits."""
    copied, planned_results = private_copy(program), plans_results(config, name)
    compute_plainly(copied, fusing=config.do_quant_fusion_and_const_prop)
    _bound(copied)
    _describe_in_file(copied)
    _keep_initial_values(copied)
    copy_where_misread(copied, planned_results=planned_results)
    write_back(copied, in_place=in_place)
    return copied


def _bound(program: ExportedProgram) -> None:
    """Bound the sizes without a bound by the example's in all that is computed from them, as ExecuTorch does alone."""
    mode = fake_mode_of(program.graph_module)
    if mode is not None and mode.shape_env is not None:
        mode.shape_env.var_to_range.update(ranges_in_file(mode.shape_env))


def _constant_methods(lowered: Lowered, options: EmitOptions) -> dict[str, Any]:
    """Check the options, and return the values that become methods."""
    config, given = options.config, options.constant_methods
    if config is not None and not isinstance(config, ExecutorchBackendConfig):
        hint = " To write a file: emit().save(path)." if isinstance(config, (str, os.PathLike)) else ""
        raise InputError(f"config: got {type(config).__name__}, expected ExecuTorch's ExecutorchBackendConfig.{hint}")
    if given is not None and (not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given)):
        raise InputError(
            f"constant_methods: got {type(given).__name__} {given!r}, expected a mapping from method names to values."
        )
    if manifest.METHOD in lowered.constant_methods and manifest.METHOD in (given or {}):
        raise InputError(f"constant_methods: {manifest.METHOD!r} is made for the families of the file; rename yours.")
    constant_methods = {**lowered.constant_methods, **(given or {})}
    both = sorted(set(lowered.programs) & set(constant_methods))
    if both:
        raise InputError(f"constant_methods: {both} are methods of the program too; choose other names.")
    return constant_methods


def _describe_in_file(program: ExportedProgram) -> None:
    """Describe what a program takes and returns in a form that files can have; the values are the same, in order."""
    calls = program.module_call_graph
    if calls and (signature := calls[0].signature) is not None:
        specs = {name: treespecs.writable(getattr(signature, name)) for name in ("in_spec", "out_spec")}
        calls[0] = replace(calls[0], signature=replace(signature, **specs))


def _keep_initial_values(program: ExportedProgram) -> None:
    """Mark buffers whose state does not start at 0: ExecuTorch drops initial values that are not marked."""
    written = graphs.written_state(program)
    buffers = program.graph_signature.inputs_to_buffers  # torch rebuilds this table at each access
    for node in program.graph.nodes:
        buffer = buffers.get(node.name) if node.op == "placeholder" else None
        value = graphs.lifted_value(program, buffer) if buffer in written else None
        if isinstance(value, torch.Tensor) and bool(value.count_nonzero()):
            node.meta["et_init_buffer"] = True


def _import_kernels(programs: Mapping[str, ExportedProgram]) -> None:
    """Import the kernels of quantized operators on the host: ExecuTorch only emits operators with out variants."""
    for method, program in programs.items():
        for path, node in graphs.every_node(program.graph_module):
            if not (graphs.is_operator(node) and graphs.operator_name(node).startswith("quantized_decomposed.")):
                continue
            try:
                import_quantized_kernels()
            except ImportError as error:
                raise InputError(
                    f"Method {method!r} cannot be emitted: {graphs.qualified_name(path, node)} "
                    f"({graphs.operator_name(node)}) stays on the host and needs the kernels of "
                    f"executorch.kernels.quantized, which cannot be imported: {error}. Install executorch from "
                    "its wheel for this platform, or delegate the operator."
                ) from error
            return


def _complete(manager: ExecutorchProgramManager, emitted: Mapping[str, Sequence[EmittedCall]]) -> None:
    """Add the calls in nested graphs to ExecuTorch's tables, which have those of top graphs only."""
    for name, calls in emitted.items():
        for call in calls:
            if call.module is None:
                manager.debug_handle_map[name].setdefault(call.instruction, call.handle)
            elif call.instruction not in manager.delegate_map[name]:
                described = {
                    "name": call.module.backend_id,
                    "delegate_map": call.module.meta.get("debug_handle_map", {}),
                }
                manager.delegate_map[name][call.instruction] = described
                nodes = call.module.original_module.graph.nodes
                handles = [handle for handle in map(debug_handles.handle, nodes) if handle is not None]
                manager.debug_handle_map[name][call.instruction] = handles


def _etrecord(
    programs: Mapping[str, ExportedProgram],
    manager: ExecutorchProgramManager,
    emitted: Mapping[str, Sequence[EmittedCall]],
) -> Any:
    _complete(manager, emitted)
    named = {name: debug_handles.copy_with_handles(program) for name, program in programs.items()}
    try:
        return edge_record(named, manager)
    except MemoryError:
        raise
    except Exception as error:
        raise InputError(f"etrecord: ExecuTorch's ETRecord cannot be made: {type(error).__name__}: {error}") from error


def _write_record(record: Any, file: BinaryIO) -> None:
    try:
        with locks.conversion():
            record.save(file)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"The ETRecord cannot be saved: ExecuTorch cannot serialize the Edge programs: {type(error).__name__}: "
            f"{reason}. Emit without etrecord=True; the debug information next to the .pte file does not need it."
        ) from error


def _attach_originals(programs: Mapping[str, ExportedProgram]) -> None:
    """Add its original graph to each delegate of private copies, for the backend `reference`, but not to such ones."""
    sites = {
        (method, number): (path, module, name)
        for method, program in programs.items()
        for number, (path, module, name) in enumerate(graphs.delegates(program.graph_module))
        if getattr(module, name).backend_id != ORIGINALS
    }
    partitions = []
    for (method, number), (path, module, name) in sites.items():
        original = graphs.copy_program(getattr(module, name).original_module)
        site = CallSite(method, path, name, (), ())
        partitions.append(Partition(original_key(method, number), method, "", ORIGINALS, (), original, site))
    if not partitions:
        return
    try:
        session = Session(LoweringOptions(check_weights=False))
        kept = preprocess(BackendGroup(ORIGINALS, tuple(partitions)), registry.find_backend(ORIGINALS), session)
    except LoweringError as error:
        raise InputError(f"keep_originals: a partition's graph cannot be kept in the file. {error}") from error
    for (_, module, name), lowered in zip(sites.values(), kept, strict=True):
        graph = named_data({lowered.partition.id: lowered.result.processed_bytes}, 1)
        weights = lowered.result.data_store_output
        setattr(module, name, add_named_data(getattr(module, name), weights, graph))


def _check_numbers(programs: Mapping[str, ExportedProgram], manager: ExecutorchProgramManager) -> None:
    """Check that a file numbers its delegates as the originals are numbered: passes may have changed the calls."""
    plans = {plan.name: plan for plan in manager.executorch_program.execution_plan}
    for method, program in programs.items():
        expected = [getattr(module, name).backend_id for _, module, name in graphs.delegates(program.graph_module)]
        emitted = [delegate.id for delegate in plans[method].delegates]
        if emitted != expected:
            raise InputError(
                f"keep_originals: method {method!r} was emitted with the delegates {emitted}, expected {expected}: a "
                "pass of the config changed the calls, so the kept graphs would belong to other delegates. Remove "
                "keep_originals or the pass."
            )
