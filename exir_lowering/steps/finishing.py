"""What comes before ExecuTorch's emitter: checks, and finishers of private copies and of its configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import torch
from executorch.exir import ExecutorchBackendConfig
from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering._upstream.delegates import add_named_data, named_data
from exir_lowering._upstream.fakes import ranges_in_file
from exir_lowering._upstream.programs import fake_mode_of
from exir_lowering._upstream.runtime import import_quantized_kernels
from exir_lowering.errors import InputError, LoweringError
from exir_lowering.graphs import treespecs
from exir_lowering.graphs.copies import private_copy
from exir_lowering.model import BackendGroup, CallSite, Partition
from exir_lowering.options import LoweringOptions
from exir_lowering.plugins import registry
from exir_lowering.pte import digests, manifest, provenance
from exir_lowering.pte.payloads import ORIGINALS, original_key
from exir_lowering.steps import host_memory, memory_planning
from exir_lowering.steps.control_flow import check_emitted
from exir_lowering.steps.file import File
from exir_lowering.steps.legalizing.plain import compute_plainly
from exir_lowering.steps.preprocess import preprocess
from exir_lowering.steps.session import Session
from exir_lowering.steps.size_functions import IN_FILES, spell
from exir_lowering.steps.write_back import write_back


def check_options(file: File) -> None:
    """Check the configuration, and the values that become methods."""
    lowered, config, given = file.lowered, file.options.config, file.options.constant_methods
    if config is not None and not isinstance(config, ExecutorchBackendConfig):
        hint = " To write a file: emit().save(path)." if isinstance(config, (str, os.PathLike)) else ""
        raise InputError(f"config: got {type(config).__name__}, expected ExecuTorch's ExecutorchBackendConfig.{hint}")
    if given is not None and (not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given)):
        raise InputError(
            f"constant_methods: got {type(given).__name__} {given!r}, expected a mapping from method names to values."
        )
    if manifest.METHOD in lowered.constant_methods and manifest.METHOD in (given or {}):
        raise InputError(f"constant_methods: {manifest.METHOD!r} is made for the families of the file; rename yours.")
    file.constant_methods = {**lowered.constant_methods, **(given or {})}
    both = sorted(set(lowered.programs) & set(file.constant_methods))
    if both:
        raise InputError(f"constant_methods: {both} are methods of the program too; choose other names.")
    file.config = memory_planning.configure(config or ExecutorchBackendConfig(), lowered.memory_planner)


def check_methods(file: File) -> None:
    """Check what methods take, and what calls graphs in them."""
    for name, program in file.lowered.programs.items():
        host_memory.check_inputs(name, program)
        check_emitted(name, program)


def copy_programs(file: File) -> None:
    """Copy the programs."""
    file.programs = {name: private_copy(program) for name, program in file.lowered.programs.items()}


def choose_operators(file: File) -> None:
    """Let the host compute with operators that its kernels do right."""
    for program in file.programs.values():
        spell(program, IN_FILES)
        compute_plainly(program, fusing=file.config.do_quant_fusion_and_const_prop)


def bound_sizes(file: File) -> None:
    """Bound the sizes without a bound by the example's, in all that is computed from them."""
    for program in file.programs.values():
        mode = fake_mode_of(program.graph_module)
        if mode is not None and mode.shape_env is not None:
            mode.shape_env.var_to_range.update(ranges_in_file(mode.shape_env))


def describe_plainly(file: File) -> None:
    """Describe what programs take and return in a form that files can have; the values are the same, in order."""
    for program in file.programs.values():
        calls = program.module_call_graph
        if calls and (signature := calls[0].signature) is not None:
            specs = {name: treespecs.writable(getattr(signature, name)) for name in ("in_spec", "out_spec")}
            calls[0] = replace(calls[0], signature=replace(signature, **specs))


def keep_first_values(file: File) -> None:
    """Mark buffers whose state does not start at 0."""
    for program in file.programs.values():
        keep_first_value(program)


def keep_first_value(program: ExportedProgram) -> None:
    """Mark such buffers of a program for ExecuTorch's emitter, which stores no state otherwise."""
    written = graphs.written_state(program)
    buffers = program.graph_signature.inputs_to_buffers  # torch rebuilds this table at each access
    for node in program.graph.find_nodes(op="placeholder"):
        buffer = buffers.get(node.name)
        value = graphs.lifted_value(program, buffer) if buffer in written else None
        if isinstance(value, torch.Tensor) and bool(value.count_nonzero()):
            node.meta["et_init_buffer"] = True


def copy_where_misread(file: File) -> None:
    """Copy what kernels of the runtime would read wrongly."""
    for name, program in file.programs.items():
        planned = memory_planning.plans_results(file.config, name)
        host_memory.copy_where_misread(program, planned_results=planned)


def write_state(file: File) -> None:
    """Write state, and inputs, with operators."""
    for program in file.programs.values():
        write_back(program, in_place=file.lowered.in_place)


def attach_originals(file: File) -> None:
    """Add its original graph to each delegate, for the backend `reference`, but not to such ones."""
    if not file.options.keep_originals:
        return
    sites, partitions = [], []
    for method, program in file.programs.items():
        for number, (path, module, name) in enumerate(graphs.delegates(program.graph_module)):
            if getattr(module, name).backend_id != ORIGINALS:
                original = graphs.copy_program(getattr(module, name).original_module)
                key, site = original_key(method, number), CallSite(method, path, name)
                partitions.append(Partition(key, method, "", ORIGINALS, (), original, site))
                sites.append((module, name))
    if not partitions:
        return
    try:
        session = Session(LoweringOptions(check_weights=False))
        kept = preprocess(BackendGroup(ORIGINALS, tuple(partitions)), registry.find_backend(ORIGINALS), session)
    except LoweringError as error:
        raise InputError(f"keep_originals: a partition's graph cannot be kept in the file. {error}") from error
    for (module, name), lowered in zip(sites, kept, strict=True):
        graph = named_data({lowered.partition.id: lowered.result.processed_bytes}, 1)
        setattr(module, name, add_named_data(getattr(module, name), lowered.result.data_store_output, graph))


def import_kernels(file: File) -> None:
    """Import the kernels of quantized operators that stay on the host."""
    for method, program in file.programs.items():
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


def choose_out_variants(file: File) -> None:
    """Change graphs after the last pass that traces them, when operators get their out variants."""
    variants = host_memory.make_emittable(file.config.to_out_var_pass)
    file.config = replace(file.config, to_out_var_pass=variants)


def record_memory(file: File) -> None:
    """Keep what the planner plans for each method."""
    file.planning = memory_planning.Planning(file)
    file.config = replace(file.config, memory_planning_pass=file.planning)


def reserve(file: File) -> None:
    """Reserve segments for what is known only when the file is complete."""
    first = {provenance.KEY: provenance.RESERVED} if file.options.provenance else {}
    file.reserved = {**first, **file.options.reserved, digests.KEY: digests.RESERVED}
