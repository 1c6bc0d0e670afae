"""Step edge: from `torch.export` output to Edge dialect; the partitioners say what not to decompose."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial

import torch
from executorch.exir import EdgeCompileConfig
from executorch.exir.verification.verifier import EXIREdgeDialectVerifier
from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering._upstream import locks
from exir_lowering._upstream.acceleration import accelerating
from exir_lowering._upstream.conversion import allow
from exir_lowering._upstream.edge import (
    SpecViolationError,
    allowed_operators,
    checks_validity,
    gen_edge_manager,
    preserved_ops_left_over,
)
from exir_lowering.errors import LoweringError, PartitionerContractError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.graphs.isolation import isolate
from exir_lowering.model import EdgeMethod
from exir_lowering.options import LoweringOptions
from exir_lowering.steps import edge_errors
from exir_lowering.steps.arguments import RequestedMethod, is_edge, require_edge
from exir_lowering.steps.cached_edge import convert_cached
from exir_lowering.steps.casewise.compare import require_equal
from exir_lowering.steps.casewise.convert import Conversion
from exir_lowering.steps.casewise.values import Uncovered
from exir_lowering.steps.conversions import converting
from exir_lowering.steps.session import Session
from exir_lowering.steps.source_recovery import recover_sources
from exir_lowering.steps.transform import run_passes


def to_edge(
    methods: Iterable[RequestedMethod], session: Session, *, decomposed: bool = False
) -> tuple[EdgeMethod, ...]:
    """Convert each program that is not in Edge dialect, as ExecuTorch's `to_edge_transform_and_lower` does.

    Args:
        methods: The methods. Operators that their partitioners want whole are not decomposed, and their passes run over
            the result. Their programs are not changed.
        session: Its option `edge_compile_config` is used.
        decomposed: Whether the programs are functional and nothing in them is to be decomposed.

    Returns:
        The methods in Edge dialect; the programs of those that were already in it, and have no passes, are the same
        objects.

    Raises:
        InputError: A program cannot be converted, or a pass failed.
    """
    with session.timed("edge"):
        return tuple(
            _edge(method, session, decomposed)
            for method in session.progress.each("convert to Edge dialect", [*methods])
        )


def as_edge(methods: Iterable[RequestedMethod]) -> tuple[EdgeMethod, ...]:
    """Accept programs in Edge dialect as they are.

    Raises:
        InputError: One is not in Edge dialect.
    """
    methods = tuple(methods)
    for method in methods:
        require_edge(method.name, method.program)
    return tuple(EdgeMethod(method.name, method.program, method.partitioners) for method in methods)


def _edge(method: RequestedMethod, session: Session, decomposed: bool) -> EdgeMethod:
    """Convert a program, unless it is in Edge dialect or its Edge program is known, and run the passes over it."""
    if is_edge(method.program) and method.passes is None:
        return EdgeMethod(method.name, method.program, method.partitioners)
    make = partial(_make_edge, method, session.options, decomposed)
    return make() if is_edge(method.program) else convert_cached(method, session, make)


def _make_edge(method: RequestedMethod, options: LoweringOptions, decomposed: bool) -> EdgeMethod:
    accelerated = accelerating(options.accelerate)
    with locks.conversion(), converting([method.program], gradients=True), accelerated:
        if is_edge(method.program):
            config, edge, origin = None, isolate(graphs.copy_program(method.program)), None
            uncovered: tuple[str, ...] = ()
        else:
            config, origin = _config(options), method.program
            edge, uncovered = _convert(method, options, config, decomposed)
        if method.passes is not None:
            edge = run_passes(method.name, edge, method.passes, config, _config(options))
    return EdgeMethod(method.name, edge, method.partitioners, origin, uncovered)


def _convert(
    method: RequestedMethod, options: LoweringOptions, config: EdgeCompileConfig, decomposed: bool
) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Convert a program; return also what was left to ExecuTorch, and why."""
    if options.edge == "executorch":
        return _convert_as_executorch(method, options, config), ()
    own = _config(options)
    try:
        conversion = Conversion(method.name, own)
        private = isolate(graphs.copy_program(method.program))
        converted = conversion.rename(private) if decomposed else conversion.convert(private, method.partitioners)
        recover_sources(method.program, converted)
    except Exception as error:  # ExecuTorch converts what is valid, and says what is wrong with what is not
        let_through(error)
        reason = str(error) if isinstance(error, Uncovered) else f"{type(error).__name__}: {error}"
        return _convert_as_executorch(method, options, config), (f"the whole conversion: {reason}",)
    if options.edge == "check":
        require_equal(method.name, converted, _convert_as_executorch(method, options, _config(options)))
    allow(config, allowed_operators(own))
    return converted, conversion.uncovered


def _convert_as_executorch(
    method: RequestedMethod, options: LoweringOptions, config: EdgeCompileConfig
) -> ExportedProgram:
    convert = partial(_convert_once, method)
    try:
        return convert(config)
    except LoweringError:
        raise
    except Exception as error:
        let_through(error)
        raise edge_errors.explain_conversion(method.name, method.program, error, _config(options), convert) from error


def _convert_once(method: RequestedMethod, config: EdgeCompileConfig) -> ExportedProgram:
    """Convert a program, with what partitioners keep whole added to the configuration."""
    name, partitioners = method.name, {method.name: list(method.partitioners)}
    private = isolate(graphs.copy_program(method.program))
    try:
        manager = gen_edge_manager(partitioners, {name: private}, config, None)
    except SpecViolationError:
        private = isolate(graphs.copy_program(method.program))
        if not _clone_writes(private):
            raise
        manager = gen_edge_manager(partitioners, {name: private}, config, None)
    converted: ExportedProgram = manager.exported_program(name)
    recover_sources(method.program, converted)
    return converted


def _clone_writes(program: ExportedProgram) -> int:
    """Clone, in the graph itself, each value that is copied into an input or a buffer; return how many there are.

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


def check_preserved(method: EdgeMethod, owner: ExportedProgram, options: LoweringOptions) -> None:
    """Check that what partitioners kept from decomposition was delegated, and that the rest is valid Edge dialect.

    Args:
        method: The method; nothing is checked if it was given in Edge dialect.
        owner: What remains of its program after the partitions were taken out.
        options: As given to `to_edge`.

    Raises:
        PartitionerContractError: A preserved operator is left on the host, where no kernel exists for it.
    """
    if method.converted_from is None:
        return
    try:
        preserved = preserved_ops_left_over(method.name, owner, list(method.partitioners))
    except Exception as error:
        let_through(error)
        raise PartitionerContractError(f"Method {method.name!r}: {error}", violation="raised") from error
    config = _config(options)
    if checks_validity(config):
        verifier = EXIREdgeDialectVerifier(
            edge_compile_config=config, class_only=True, preserve_ops=list(config.preserve_ops) + preserved
        )
        verifier()(owner.graph_module)


def _config(options: LoweringOptions) -> EdgeCompileConfig:
    """Copy the configuration, since ExecuTorch appends to its lists."""
    return copy.deepcopy(options.edge_compile_config) if options.edge_compile_config else EdgeCompileConfig()
