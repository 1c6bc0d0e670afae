"""Step edge: from `torch.export` output to Edge dialect, asking the partitioners what not to decompose."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from executorch.exir import EdgeCompileConfig
from executorch.exir.backend.partitioner import Partitioner
from executorch.exir.verification.verifier import EXIREdgeDialectVerifier
from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering._upstream import locks
from exir_lowering._upstream.edge import SpecViolationError, checks_validity, gen_edge_manager, preserved_ops_left_over
from exir_lowering.errors import LoweringError, PartitionerContractError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.graphs.isolation import isolate
from exir_lowering.options import LoweringOptions
from exir_lowering.steps import edge_errors
from exir_lowering.steps.arguments import Passes, is_edge
from exir_lowering.steps.conversions import converting
from exir_lowering.steps.progress import Progress
from exir_lowering.steps.transform import transformed


def to_edge(
    methods: Mapping[str, ExportedProgram],
    partitioners: Mapping[str, Sequence[Partitioner]],
    options: LoweringOptions,
    progress: Progress,
    passes: Mapping[str, Passes] = MappingProxyType({}),
) -> dict[str, ExportedProgram]:
    """Convert each program that is not in Edge dialect, as ExecuTorch's `to_edge_transform_and_lower` does.

    Args:
        methods: Programs by method, in ATen or Edge dialect. They are not changed.
        partitioners: The partitioners of each method; operators that they want whole are not decomposed.
        options: Its `edge_compile_config` is used.
        progress: Shows the methods as they are done.
        passes: The passes that run over methods in Edge dialect.

    Returns:
        The programs in Edge dialect; those that were in it already, and have no passes, are the same objects.

    Raises:
        InputError: A program cannot be converted, or a pass failed.
    """
    edge: dict[str, ExportedProgram] = {}
    for name, program in progress.each("convert to Edge dialect", methods.items()):
        if is_edge(program) and name not in passes:
            edge[name] = program
            continue
        with locks.conversion(), converting([program], gradients=True):
            edge[name] = _made(name, program, partitioners[name], options, passes.get(name))
    return edge


def _made(
    name: str,
    program: ExportedProgram,
    partitioners: Sequence[Partitioner],
    options: LoweringOptions,
    passes: Passes | None,
) -> ExportedProgram:
    """Convert a program, unless it is in Edge dialect, and run the passes over it."""
    if is_edge(program):
        config, edge = None, isolate(graphs.copy_program(program))
    else:
        config = _config(options)
        edge = _convert(name, program, partitioners, options, config)
    return edge if passes is None else transformed(name, edge, passes, config, _config(options))


def _convert(
    name: str,
    program: ExportedProgram,
    partitioners: Sequence[Partitioner],
    options: LoweringOptions,
    config: EdgeCompileConfig,
) -> ExportedProgram:
    convert = partial(_converted, name, program, partitioners)
    try:
        return convert(config)
    except LoweringError:
        raise
    except Exception as error:
        let_through(error)
        raise edge_errors.conversion(name, program, error, _config(options), convert) from error


def _converted(
    name: str, program: ExportedProgram, partitioners: Sequence[Partitioner], config: EdgeCompileConfig
) -> ExportedProgram:
    """Convert a program; what partitioners keep whole is added to the configuration."""
    private = isolate(graphs.copy_program(program))
    try:
        manager = gen_edge_manager({name: list(partitioners)}, {name: private}, config, None)
    except SpecViolationError:
        private = isolate(graphs.copy_program(program))
        if not _clone_writes(private):
            raise
        manager = gen_edge_manager({name: list(partitioners)}, {name: private}, config, None)
    converted: ExportedProgram = manager.exported_program(name)
    _recover_sources(program, converted)
    return converted


def _recover_sources(program: ExportedProgram, converted: ExportedProgram) -> None:
    """Give nodes their source lines back that conversion took for lines of generated code.

    It does so to graphs that it inlines, such as those under torch.no_grad(); the generated line has the name that the
    node had in the program.
    """
    traces: dict[str, set[str]] = {}
    for _, module in graphs.walk(program.graph_module):
        for node in module.graph.nodes:
            if graphs.source_line(node):
                traces.setdefault(node.name, set()).add(node.meta["stack_trace"])
    for _, module in graphs.walk(converted.graph_module):
        for node in module.graph.nodes:
            found = traces.get(graphs.generated_name(node), ())
            if len(found) == 1:
                (node.meta["stack_trace"],) = found


def _clone_writes(program: ExportedProgram) -> int:
    """Clone, in place, each value that is copied into an input or a buffer; return how many there are.

    A signature names a mutation by its value, so torch cannot describe a program that writes one value to two buffers.
    """
    writes = [
        node
        for node in program.graph.nodes
        if node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder"
    ]
    for write in writes:
        with program.graph.inserting_before(write):
            clone = program.graph.call_function(torch.ops.aten.clone.default, (write.args[1],))
        clone.meta = dict(write.args[1].meta)
        write.update_arg(1, clone)
    return len(writes)


def check_preserved(
    owners: Mapping[str, ExportedProgram],
    partitioners: Mapping[str, Sequence[Partitioner]],
    options: LoweringOptions,
) -> None:
    """Check that what partitioners kept from decomposition was delegated, and that the rest is valid Edge dialect.

    Args:
        owners: What partitions left of the programs that `to_edge` converted.
        partitioners: The partitioners of each method.
        options: As given to `to_edge`.

    Raises:
        PartitionerContractError: A preserved operator is left on the host, where no kernel exists for it.
    """
    for name, owner in owners.items():
        try:
            preserved = preserved_ops_left_over(name, owner, partitioners[name])
        except Exception as error:
            let_through(error)
            raise PartitionerContractError(f"Method {name!r}: {error}", violation="raised") from error
        config = _config(options)
        if checks_validity(config):
            verifier = EXIREdgeDialectVerifier(
                edge_compile_config=config, class_only=True, preserve_ops=list(config.preserve_ops) + preserved
            )
            verifier()(owner.graph_module)


def _config(options: LoweringOptions) -> EdgeCompileConfig:
    """Copy the configuration: ExecuTorch adds to its lists."""
    return copy.deepcopy(options.edge_compile_config) if options.edge_compile_config else EdgeCompileConfig()
